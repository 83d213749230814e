"""What tasks.py and recovery.py use of a Trainer."""

from pathlib import Path
from typing import Protocol

from gpt2_triton.config.config import Config
from gpt2_triton.data.loader import MicroBatches
from gpt2_triton.distributed.control import ControlGroup
from gpt2_triton.distributed.process_group import ProcessGroup
from gpt2_triton.distributed.watchdog import Watchdog
from gpt2_triton.model.model import Model
from gpt2_triton.training.logger import Logger, NullLogger
from gpt2_triton.training.preemption import ShutdownSignals
from gpt2_triton.training.run_state import RunState
from gpt2_triton.training.setup import Data


class Run(Protocol):
    """A run between two steps."""

    config: Config
    run_dir: Path
    data: Data
    batches: MicroBatches
    model: Model
    state: RunState
    log: Logger | NullLogger
    signals: ShutdownSignals
    group: ProcessGroup
    control: ControlGroup
    watchdog: Watchdog

    def wait_for_save(self, raise_errors: bool = False) -> None: ...
