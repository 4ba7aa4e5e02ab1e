"""Chapter 24: which plan fits a model on a cluster best, and why.

`python -c "help('minidist.plan.ranking')"` says how; `minidist plan` is the command.
"""
