"""Chapter 24: the best plan for a model on a cluster, with the reasons.

`python -c "help('minidist.plan.ranking')"` shows its use; `minidist plan` is the command.
"""
