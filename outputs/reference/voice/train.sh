#!/bin/bash
# A voice trained on one GPU, in commands of some minutes each. In the root of the repository, on that machine:
#   train.sh keep FILE...   puts files that travelled with this command into $V: all files of `train teacher --kokoro K
#                           --fetch`; texts.xz and natural.xz of `train texts --kokoro K`; to go on from another run, its
#                           voice-state.N
#   train.sh start SECONDS  trains for $MINUTES, for $JOINT of them encoder and codebooks too, then the decoder for $TUNE
#                           (by default to the end), and the talker for the last $TALK (by default from when there is speech);
#                           ends after SECONDS at most
#   train.sh wait SECONDS   the same of what runs
# Both put into $OUT the voice-state.N that another run goes on from, 15 MB each, and `start` two of the teacher's shards that
# judge the voice (NATURAL=23: the other two). Stop where `numbers` of codec.log are below 10 after 1 500 steps without judges.
# The voice in the box: of `train texts --count 260000`, FIRST=16 CODEC_MORE="--judged-frames 8 --pitch 0" CLIPS=120000 until the codec
# is at step 25,250, 20,000 of them with its encoder, and the talker at 10,250; from these voice-state, in a run of its own,
# FIRST=16 CODEC_MORE="--judged-frames 8" CLIPS=100000 MINUTES=21 TALK=10: codec to 41,250, talker to 18,750. 0.2 for both
# temperatures of generation_config.json, and michael first in config.json. Then refit.py, for the decoder.
V=${V:-/tmp/v}
MINUTES=${MINUTES:-25} JOINT=${JOINT:-13} DEVICE=${DEVICE:-cuda} OTHER=${OTHER:-$DEVICE}
SPEAKERS=${SPEAKERS:-heart=af_heart:2.4,michael=am_michael:3.9}
FIRST=${FIRST:-12} PER=${PER:-1000} CLIPS=${CLIPS:-40000} # shards that the codec learns from, clips of a shard, of all (0: no talker)
export OMP_NUM_THREADS=4 PYTHONUNBUFFERED=1 TORCHDYNAMO_SUPPRESS_ERRORS=1
mkdir -p $V

left() { python3 -c "import time; print(max(0.05, $MINUTES - (time.time() - $BEGUN) / 60 - $1))"; }
teach() { python3 -m mktts train teacher --kokoro . --device $OTHER --speakers $SPEAKERS --per-shard $PER "$@"; }
learn() { # STAGE MINUTES ARGUMENTS...: planned to end then; without CUDA graphs where a step cannot be recorded
    local stage=$1 minutes=$2 end=$(python3 -c "import time; print(time.time() + 60 * $2)")
    shift 2
    for graphs in --graphs ""; do
        timeout -k 10 ${MINUTES}m python3 -m mktts train $stage --out $stage --resume --plan $minutes "$@" $graphs \
            --minutes $(python3 -c "import time; print(max(0.05, ($end - time.time()) / 60))") >> $stage.log 2>&1 && return
    done
}
codec() { learn codec "$@" --device $DEVICE --data first --judged-frames 10 --adversarial-from ${JUDGES:-9000} $CODEC_MORE; }

run() {
    cd $V && export PYTHONPATH=$V/repo BEGUN=$(date +%s)
    mkdir -p first audio natural
    if ls voice-state.* 2> /dev/null; then cat voice-state.* | tar xJ; fi
    teach --texts texts.xz --clips $((FIRST * PER)) --out audio > teacher.log 2>&1
    ln -sf $(ls -d $PWD/audio/*.npz | head -$FIRST) first/
    (
        teach --texts natural.xz --per-shard 80 --out natural
        [ $CLIPS = 0 ] || teach --texts texts.xz --clips $CLIPS --out audio
    ) >> teacher.log 2>&1 &
    local teacher=$!
    if [ ! -f codec/frozen ]; then
        codec $JOINT --plan $(python3 -c "print($JOINT + ${TUNE:-$(left 1) - $JOINT})") --joint-steps 100000000
        python3 -c "
from pathlib import Path
from mktts.training.state import read_state
print(read_state(Path('codec'))['step'])" > codec/frozen
    fi
    rm -rf frozen && cp -r codec frozen
    codec ${TUNE:-$(left 1)} --joint-steps $(cat codec/frozen) &
    wait $teacher # the talker learns from what is there when it begins
    sleep $(left ${TALK:-$MINUTES})m
    [ $CLIPS = 0 ] || learn talker $(left 1.5) --device $OTHER --data audio --codec frozen $TALKER_MORE
    wait
    touch done
}

pack() { # what `train` wrote; a state is one file, replaced as a whole
    rm -rf light && mkdir -p light/codec
    cp codec/light/* codec/frozen light/codec/ 2> /dev/null
    [ $CLIPS = 0 ] || { mkdir -p light/talker && cp talker/light/* light/talker/; }
    cp *.log light/
    tar c -C light . | xz -3 -T0 | split -d -a 1 -b 15000000 - $OUT/voice-state.
    if [ "$1" = start ]; then cp natural/shard0000[${NATURAL:-01}].npz $OUT/; fi # 64 MB come back in all
}

case $1 in
keep) cp "${@:2}" $V/ ;;
run) run ;;
start)
    rm -rf $V/repo $V/done && mkdir -p $V/repo && cp -r mktts $V/repo/
    setsid nohup bash $0 run > $V/run.log 2>&1 < /dev/null &
    ;;
esac
if [ "$1" = start ] || [ "$1" = wait ]; then
    end=$((SECONDS + $2))
    while [ $SECONDS -lt $end ] && [ ! -f $V/done ]; do
        sleep 10
        tail -qn 1 $V/codec.log $V/talker.log $V/teacher.log 2> /dev/null | cut -c1-300
    done
    cd $V && tail -n 5 run.log ./*.log && pack "$1"
fi
