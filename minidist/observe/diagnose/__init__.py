"""What broke a job, from its ranks' flight recorders: culprit, place, cause, evidence, how sure,
what to do."""
