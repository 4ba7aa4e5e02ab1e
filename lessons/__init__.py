"""The lessons: NN_name/ holds README.md, lesson.py, figure.py, exercise.py and check.py."""
