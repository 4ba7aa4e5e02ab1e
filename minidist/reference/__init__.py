"""The pages of docs/reference and docs/measured, made from the code and from the files of results.

    python -m minidist.reference      # write all of them again, in a clone

    command_line    options of every command, from the parsers
    api             signatures and docstrings of the public names
    errors          the tree of minidist.errors, and exit statuses
    run_files       files of a run folder, and their keys
    rules           causes that `minidist diagnose` names, with the constants of its rules
    measured        tables of benchmarks/results/*.json, a page per machine

A test fails where a page differs from what is made here.
"""
