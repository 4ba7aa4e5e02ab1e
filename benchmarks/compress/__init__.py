"""`minidist bench compress`: training by each scheme of chapter 21 over links from 10 Mbit/s to 10
Gbit/s.

ways, links     schemes and local steps from their texts; bandwidths from theirs
ranks           the ranks' side: trainings over a link whose speed changes
time_to_loss    time until a training reaches a given loss, by scheme and bandwidth
advise          when not to compress: the link model
check           measurements that check the advice
kept            the results of an interrupted measurement
bounds          the bounds that both measurements must hold
command, tables, plots      for both measurements
"""
