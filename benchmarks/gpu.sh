#!/usr/bin/env bash
# Everything that waits for a GPU, in one command, section by section. No network and no installation is needed.
#
#   benchmarks/gpu.sh                       every section that is not done yet; a table at the end
#   benchmarks/gpu.sh --list                what each section runs, and for how long
#   benchmarks/gpu.sh --only step nccl      these sections
#   benchmarks/gpu.sh --within 570          begins no section that would not end in so many seconds from now
#   benchmarks/gpu.sh --rehearse            over the stand-ins for CuPy of tests/support: no GPU, and no figure counts
#   benchmarks/gpu.sh --out DIR             where results go (default: $OUT, or benchmarks/results/gpu/<date>)
#   benchmarks/gpu.sh --site DIR            a folder of unzipped wheels, for packages that are missing here
#
# A section writes its log, its JSON files and result.json into DIR/<section>, and `done` when it has succeeded. Run
# again, the script goes on where it stopped: what is done stays, what failed runs again. results.tar.gz has all files.
set -euo pipefail

root=$(cd "$(dirname "$0")/.." && pwd)
out=${OUT:-} site='' listing=false rehearsal=false within=86400 only=()
while [ $# -gt 0 ]; do
    case $1 in
    --list) listing=true ;;
    --rehearse) rehearsal=true ;;
    --out) out=$2; shift ;;
    --site) site=$(cd "$2" && pwd); shift ;;
    --within) within=$2; shift ;;
    --only) while [ $# -gt 1 ] && [[ $2 != --* ]]; do only+=("$2"); shift; done ;;
    -h | --help) sed -n '2,14s/^# \{0,1\}//p' "$0"; exit 0 ;;
    *) echo "gpu.sh: no option $1; see --help" >&2; exit 2 ;;
    esac
    shift
done

# ------------------------------------------------------------------------------------------------------------ sections
# section NAME LIMIT EXPECTED NEEDS ABOUT, then its commands, a line each. LIMIT and EXPECTED are seconds; NEEDS are
# modules and tools (tool:NAME). {root} is the repository, {here} the section's folder. EXPECTED is a
# guess with reserve.

names=()
declare -A limit expected needs about commands
section() {
    names+=("$1")
    limit[$1]=$2 expected[$1]=$3 needs[$1]=$4 about[$1]=$5
    commands[$1]=$(cat)
}

basic="cupy numpy ml_dtypes msgpack psutil rich threadpoolctl"
tested="$basic pytest pytest_timeout xdist hypothesis"
marked="gpu" small='' drawn='' sampled="gpu and not soak" captured='' shapes='' alone='' calls='' filled='' bytes=1KiB:64MiB raced=nccl,shm model="--layers 2 --width 64 --heads 4 --context 32 --batch 8 --steps 5"
if $rehearsal; then         # the CPU build of the kernels takes seconds for what a GPU does in microseconds
    marked="gpu and not soak" captured="--collect-only -q" shapes="-k 'shape0 or shape1'"
    small="--layers 1 --width 32 --heads 2 --context 16 --batch 1 --vocab 64 --rounds 1 --steps 1" drawn="--rounds 1" bytes=1KiB raced=shm
    model="--layers 1 --width 16 --heads 2 --context 8 --batch 4 --vocab 128 --steps 2"
    alone="--collect-only -q" filled="-k rubbish" calls=every_algorithm        # between processes the stand-in has no NCCL
fi
# A warning of CuPy's must not end a test here, where a second try may be far.
tests() { echo "python3 -m pytest -p no:cacheprovider -W default -rfEs --tb=short --timeout 200 -m '${2:-$marked}'" \
    "--junitxml={here}/$1.xml"; }
bench="python3 -m minidist bench"
kernels() { echo "$bench kernels $2 $drawn --json {here}/$1.json --figure {here}/$1.png"; }
train="python3 -m minidist train --device cuda --dtype float32 $model --verify --quiet"
launch="python3 -m minidist launch"

section machine 60 20 "" "device, driver, versions, and what is missing" <<END
python3 {root}/benchmarks/gpu_table.py machine --json {here}/machine.json
END
section conformance 300 60 "$tested" "collectives over CuPy's arrays, every verb by every algorithm: threads, processes" <<END
$(tests threads) {root}/tests/comm/test_group.py
python3 {root}/tests/support/gpu_calls.py tcp
python3 {root}/tests/support/gpu_calls.py shm
END
section tests-core 300 90 "$tested" "pytest -m gpu: device, ops, modules" <<END
$(tests core) {root}/tests/device {root}/tests/autograd {root}/tests/nn
END
section tests-kernels 540 150 "$tested" "pytest -m gpu: every kernel beside its reference" <<END
$(tests kernels) {root}/tests/kernels --ignore {root}/tests/kernels/test_gpu.py
$(tests shapes) {root}/tests/kernels/test_gpu.py $shapes
END
section tests-parallel 540 120 "$tested" "pytest -m gpu: strategies on 1 to 3 ranks that are threads and share a GPU" <<END
$(tests parallel) {root}/tests/parallel/test_gpu.py
END
section tests-graph 300 60 "$tested" "pytest -m gpu: a step captured as one CUDA graph" <<END
$(tests graph) {root}/tests/parallel/hybrid $captured
END
section step 540 120 "$basic matplotlib" "a step of GPT-2 124M in bf16: eager, PyTorch eager, torch.compile" <<END
$bench step --model gpt2-124m --device cuda --precision bf16 --json {here}/step.json --figure {here}/step.png $small
END
section step-graph 540 120 "$basic matplotlib" "the same, with the step as one CUDA graph" <<END
$bench step --model gpt2-124m --device cuda --precision bf16 --graph --json {here}/step.json --figure {here}/step.png $small
END
section processes 300 60 "$basic" "training on two ranks that are processes and share a GPU" <<END
$train -n 2 --transport tcp --json {here}/tcp.json
$train -n 2 --transport shm --zero 3 --json {here}/shm.json
$train -n 2 --transport nccl --json {here}/nccl.json
END
section nccl 540 90 "$tested cupy.cuda.nccl" "NCCL: one rank; ranks that share a GPU by CUDA IPC, and by NCCL where it can" <<END
$(tests one) {root}/tests/comm/transports/gpu -k of_one_rank_on
$launch -n 2 {root}/tests/support/gpu_calls.py nccl $calls
$launch -n 3 {root}/tests/support/gpu_calls.py nccl $calls
$bench all-reduce -n 2 --only $raced $drawn --sizes $bytes --json {here}/all-reduce.json
if python3 {root}/benchmarks/gpu_table.py nccl; then NCCL_MULTI_RANK_GPU_ENABLE=1 $launch -n 2 {root}/tests/support/gpu_calls.py nccl; fi
END
section mpi 300 60 "$tested mpi4py tool:mpirun" "ranks that mpirun starts: training, and pytest -m gpu of transport nccl" <<END
mpirun -n 2 $train --json {here}/mpi.json
$(tests mpi) {root}/tests/comm/transports/gpu $alone
END
section kernels-rows 540 150 "$basic matplotlib" "bench kernels: softmax, loss, norms, activations, dropout, sums, rotary" <<END
$(kernels rows "softmax cross_entropy norm activation dropout add rotary")
END
section kernels-flat 540 150 "$basic matplotlib" "bench kernels: embedding, experts, Adam, norms, casts, compression" <<END
$(kernels flat "embedding permute adam global_norm casts ring_add quantise selection")
END
section kernels-products 540 100 "$basic matplotlib" "bench kernels: products and attention" <<END
$(kernels products "matmul matmul_float8 attention")
END
section tests-bench 540 90 "$tested matplotlib" "pytest -m gpu: the benches themselves" <<END
$(tests bench) {root}/tests/benchmarks $filled
END
section memcheck 540 200 "$tested tool:compute-sanitizer" "NVIDIA's checker: memory of the kernels' tests, a sample" <<END
compute-sanitizer --tool memcheck --error-exitcode 9 $(tests memcheck "$sampled") {root}/tests/kernels $shapes
END
section racecheck 540 200 "$tested tool:compute-sanitizer" "NVIDIA's checker: races in shared memory, a sample" <<END
compute-sanitizer --tool racecheck --error-exitcode 9 $(tests racecheck "$sampled") {root}/tests/kernels $shapes
END

filled() {          # the commands of section $1, whose folder is $2
    local text=${commands[$1]//\{root\}/$(printf %q "$root")}
    printf '%s\n' "${text//\{here\}/$2}"
}

for name in "${only[@]}"; do
    [ -n "${limit[$name]:-}" ] || { echo "gpu.sh: no section $name; choose from ${names[*]}" >&2; exit 2; }
done
[ ${#only[@]} -eq 0 ] || names=("${only[@]}")

if $listing; then
    total=0
    for name in "${names[@]}"; do
        total=$((total + expected[$name]))
        printf '%s: %s\n  at most %s s, about %s s (a guess until it is measured); needs %s\n' "$name" \
            "${about[$name]}" "${limit[$name]}" "${expected[$name]}" "${needs[$name]:-Python alone}"
        filled "$name" '$OUT'"/$name" | sed 's/^/    /'
    done
    echo "${#names[@]} sections, about $total s; each command runs in an empty folder, with a link to minidist in PYTHONPATH"
    exit 0
fi

# ---------------------------------------------------------------------------------------------------------- surroundings

if [ -z "$out" ] && $rehearsal; then out=$(mktemp -d); fi
out=${out:-$root/benchmarks/results/gpu/$(date +%F)}
mkdir -p "$out"
out=$(cd "$out" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# Without an installation, a link to the package stands alone in a folder of the path.
mkdir "$work/site" "$work/empty"
ln -s "$root/minidist" "$work/site/minidist"
mkdir "$work/site/minidist.dist-info"          # runs record the version
printf 'Metadata-Version: 2.1\nName: minidist\nVersion: %s\n' "$(sed -n 's/^version = //p' "$root/setup.cfg")" \
    >"$work/site/minidist.dist-info/METADATA"
path=$work/site:$root/tests/support${site:+:$site}${PYTHONPATH:+:$PYTHONPATH}
stand_in=$root/tests/support/stand_in
if $rehearsal; then PATH=$stand_in/bin:$PATH; fi
export MPLBACKEND=Agg PYTHONUNBUFFERED=1
unset PYTHONDONTWRITEBYTECODE COLUMNS

surround() {        # PYTHONPATH of a section: in a rehearsal with the stand-in that knows what it uses
    local kind=at_once
    [ "$1" = nccl ] && kind=streams
    if $rehearsal; then echo "$stand_in/$kind:$path"; else echo "$path"; fi
}

ask() { (cd "$work/empty" && PYTHONPATH=$(surround at_once) python3 "$root/benchmarks/gpu_table.py" "$@"); }
ask machine --json "$work/machine.json" >/dev/null
table() {
    local way=()
    if $rehearsal; then way=(--rehearsal); fi
    ask "$@" --machine "$work/machine.json" --out "$out" "${way[@]}"
}

# Runs the commands of a section; sets `state`. Every command runs, and the first that fails gives the state.
run_section() {
    local here=$out/$1 deadline=$2 status=0 line
    state=done
    while IFS= read -r line; do
        printf '\n$ %s\n' "$line" >>"$here/log"
        status=0
        (cd "$work/empty" && PYTHONPATH=$(surround "$1") timeout --kill-after=10 "$((deadline > SECONDS ? deadline - SECONDS : 1))" \
            bash -c "$line") >>"$here/log" 2>&1 </dev/null || status=$?
        if [ "$state" = done ] && [ $status -eq 124 ]; then state="out of time"; fi
        if [ "$state" = done ] && [ $status -ne 0 ]; then state="failed (exit $status)"; fi
    done < <(filled "$1" "$(printf %q "$here")")
}

# ------------------------------------------------------------------------------------------------------------- the run

for name in "${names[@]}"; do
    here=$out/$name
    if [ -e "$here/done" ]; then echo "$name: done before"; continue; fi
    if ((SECONDS + expected[$name] > within)); then echo "$name: no time left for it; run again"; continue; fi
    mkdir -p "$here"
    find "$here" -mindepth 1 -delete
    table head --section "$name" --about "${about[$name]}" --commands "${commands[$name]}" >"$here/log"
    begun=$SECONDS
    missing=$(table missing --needs "${needs[$name]}")
    if [ -n "$missing" ]; then
        state="cannot run: $missing"
    else
        echo "$name: ${about[$name]} …"
        left=$((within - SECONDS))
        run_section "$name" "$((SECONDS + (limit[$name] < left ? limit[$name] : left)))"
    fi
    table section --section "$name" --state "$state" --seconds "$((SECONDS - begun))" --commands "${commands[$name]}"
    if [ "$state" = done ]; then touch "$here/done"; fi
    case $state in done | cannot*) ;; *) tail -n 15 "$here/log" ;; esac
    if [ "$name" = machine ]; then sed -n '/^\$/,$p' "$here/log"; fi
    echo "$name: $state, $((SECONDS - begun)) s"
done
status=0
table table || status=$?
tar -czf "$work/results.tar.gz" --exclude=results.tar.gz -C "$out" . && mv "$work/results.tar.gz" "$out"
exit $status
