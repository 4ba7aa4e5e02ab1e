"""`minidist bench compress`: training by each scheme of chapter 21 over links from 10 Mbit/s to 10
Gbit/s.

ways, links     schemes and local steps by their texts; bandwidths by theirs
ranks           the ranks' side: trainings over a link that changes its speed
time_to_loss    when a training reaches a given loss, by scheme and bandwidth
advise          when not to compress: the link model
check           its advice, measured
kept            what an interrupted measurement has found
bounds          what both are asked to show, and whether they do
command, tables, plots      of both
"""
