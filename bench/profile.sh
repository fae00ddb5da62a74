#!/bin/sh
# Where the warps of one step stand: samples per machine instruction, with Nsight Compute.
# sh bench/profile.sh BATCH; writes $OUT/profile_b<batch>.csv (address, instruction, samples).
set -e
report=$(mktemp -d)/profile
ncu -k megakernel -s 3 -c 1 --clock-control none --metrics group:smsp__pcsamp_warp_stall_reasons \
  -f -o "$report" python3 bench/trace_north.py --batch "$1" --steps 5 --untraced > /dev/null
ncu --import "$report.ncu-rep" --page source --csv > "$OUT/profile_b$1.csv"
ncu --import "$report.ncu-rep" --page raw | grep pcsamp_warps
