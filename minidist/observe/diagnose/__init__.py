"""Diagnosis of a broken job from its ranks' flight recorders: culprit, place, cause, evidence,
certainty, advice."""
