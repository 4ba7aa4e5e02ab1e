"""`mpirun -n P python in_turn.py FOLDER NN...`: each lesson's script as it stands, its tables in
FOLDER/NN.json.

Several lessons share the start of Python, of MPI and of minidist, which costs as much as a short
lesson.
"""

import runpy
import sys

from minidist import lessons

folder, *numbers = sys.argv[1:]
for number in numbers:
    script = str(lessons.find(number).part("lesson.py"))
    sys.argv = [script, "--json", f"{folder}/{number}.json"]
    print(f"lesson {number}", flush=True)
    runpy.run_path(script, run_name="__main__")
