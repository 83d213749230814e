#!/usr/bin/env bash
# Exports a model and scores it with lm-evaluation-harness.  Needs: pip install "lm-eval[hf]"
#   eval/lm_eval.sh SOURCE OUT [TASKS] [more arguments of lm_eval]
# SOURCE: a run, a step directory, or hf:, llmc: or nanogpt: weights, as for `export`.
# OUT: a new directory, or one of an earlier export.  TASKS: comma-separated, by default hellaswag.
# With HELLASWAG=hellaswag_val.jsonl, the task hellaswag_file reads that file and nothing is downloaded; without it, the
# harness downloads the data of its tasks from the Hugging Face Hub.
set -eu
if [ $# -lt 2 ]; then
    echo "error: expected SOURCE and OUT:" >&2
    sed -n '2,7s/^# //p' "$0" >&2
    exit 2
fi
source=$1 out=$2 tasks=${3:-hellaswag}
shift $(($# < 3 ? $# : 3))
[ -f "$out/config.json" ] || python -m gpt2_triton export "$source" --out "$out"
include=()
if [ -n "${HELLASWAG:-}" ]; then
    mkdir -p "$out/tasks"
    cat > "$out/tasks/hellaswag_file.yaml" <<YAML
include: $(python -c "import importlib.util as u; print(u.find_spec('lm_eval').submodule_search_locations[0])")/tasks/hellaswag/hellaswag.yaml
task: hellaswag_file
dataset_path: json
dataset_kwargs: {data_files: {validation: $(realpath "$HELLASWAG")}}
training_split: null
YAML
    include=(--include_path "$out/tasks")
fi
grep -qs begin_of_text "$out/tokenizer_config.json" && begin=,add_bos_token=True || begin=
lm_eval run --model hf --model_args "pretrained=$out,dtype=float32$begin" --tasks "$tasks" "${include[@]}" \
    --batch_size 32 --output_path "$out/lm_eval" "$@"
