#!/usr/bin/env bash
# Finds the first wrong layer of a port with the plain commands, as `mm2-test bisect` does by itself.

set -euo pipefail

usage() {
    cat <<'HELP'
Usage: scripts/bisect_layers.sh --model DIR --golden DIR --target PATH.py:NAME --layers A:B [--piece N] [-- OPTION...]

Finds the first layer of A to B-1 whose output is wrong, by halves. `mm2-test multi-layer` runs each half in pieces of
at most N layers (default: 2). Each piece begins with the golden's own input, and each of its layers is judged: a wrong
layer fails its piece. Longer pieces start fewer processes, but their later layers inherit the noise of all layers
before, in which mistakes hide. On synthetic models a piece of 15 hid gate and up swapped in its seventh layer. The last
suspect runs alone, with `mm2-test single-layer`.

`mm2-test bisect` does the same in one process, keeps the compiled graphs, and goes on where it was interrupted.

Options behind -- go to each command, such as --backend xla-cpu. MM2_TEST names the command (default: mm2-test).

Exit codes: 0 no layer found, 1 a layer is wrong, 2 wrong usage, 3 a command could not run.

Example: scripts/bisect_layers.sh --model model --golden mm2-captures/gpu_reference/full_model \
             --target port.py:DecoderLayer --layers 0:62 -- --backend xla-cpu
HELP
}

refuse() {
    echo "Error: $1. See --help." >&2
    exit 2
}

model="" golden="" target="" layers="" piece=2
while [ $# -gt 0 ]; do
    case "$1" in
        --help | -h) usage; exit 0 ;;
        --model | --golden | --target | --layers | --piece)
            [ $# -ge 2 ] || refuse "$1 needs a value"
            printf -v "${1#--}" '%s' "$2"
            shift 2
            ;;
        --) shift; break ;;
        *) refuse "$1 is unknown" ;;
    esac
done
for name in model golden target layers; do
    [ -n "${!name}" ] || refuse "--$name is missing"
done
[[ "$layers" =~ ^([0-9]+):([0-9]+)$ ]] || refuse "--layers $layers is no A:B"
start=$((10#${BASH_REMATCH[1]})) stop=$((10#${BASH_REMATCH[2]}))
[ "$start" -lt "$stop" ] || refuse "--layers $layers holds no layer"
[[ "$piece" =~ ^[1-9][0-9]*$ ]] || refuse "--piece $piece is no positive number"

read -r -a mm2_test <<<"${MM2_TEST:-mm2-test}"
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
others=("$@")

# Runs one command; 0 where the port passes, 1 where it fails. Anything else ends the script.
passes() {
    local code=0
    "${mm2_test[@]}" "$@" --model "$model" --golden "$golden" --target "$target" --sites layer --quiet \
        --output-dir "$scratch/run" --overwrite "${others[@]}" >"$scratch/output" || code=$?
    case "$code" in
        0 | 1) return "$code" ;;
        *) cat "$scratch/output" >&2; exit 3 ;;
    esac
}

# Runs layers $1 to $2-1 piece by piece; sets first and behind to the first piece that fails.
half_passes() {
    local from
    for ((from = $1; from < $2; from += piece)); do
        first=$from behind=$((from + piece < $2 ? from + piece : $2))
        if ((behind - first == 1)); then
            passes single-layer --layer "$first" || return 1
        else
            passes multi-layer --layers "$first:$behind" || return 1
        fi
    done
}

first=0 behind=0 is_known_wrong=no runs=0
while true; do
    middle=$((start + (stop - start) / 2))
    ((middle > start)) || middle=$stop
    runs=$((runs + 1))
    if half_passes "$start" "$middle"; then
        echo "run $runs: layers $start:$middle pass"
        ((middle < stop)) || break
        start=$middle
    else
        echo "run $runs: layers $start:$middle fail, at layers $first:$behind"
        start=$first stop=$behind is_known_wrong=yes
        if ((stop - start == 1)); then
            echo "layer $start is wrong; look inside with:"
            printf ' '
            printf ' %q' "${mm2_test[@]}" single-layer --layer "$start" --model "$model" --golden "$golden" \
                --target "$target" "${others[@]}"
            echo
            exit 1
        fi
    fi
done
if [ "$is_known_wrong" = yes ]; then
    echo "a piece failed, and each of its parts passes: the error grows from layer to layer"
    exit 1
fi
echo "no layer found; small mistakes hide in a layer's output: see mm2-test sweep --sites all"
