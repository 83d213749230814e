"""`config-table`: every key of the configuration, as docs/config.md."""


def config_table() -> None:
    """Print a table of every key of the configuration in Markdown, as in docs/config.md."""
    from gpt2_triton.configtable import table

    print(table(), end="")
