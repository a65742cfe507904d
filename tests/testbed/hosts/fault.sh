#!/bin/bash
# Breaks one host of a running testbed, or mends it.
#
# network, undone by `heal HOST`:
#   cut HOST               link down; peers get "no route to host" after ~3 s
#   drop HOST              every packet of HOST silently lost; peers time out
#   isolate HOST           HOST and the other hosts lose each other's packets,
#                          the laptop still reaches all
#   block HOST PORT        TCP connections to PORT of HOST time out
#   slow HOST 50ms         each frame from and to HOST that much later
#   rate HOST 10mbit       HOST's link carries at most that, each way
#   heal HOST
# sshd:
#   stop-sshd HOST         no new logins (refused); running sessions go on
#   start-sshd HOST
#   hang-sshd HOST         connects, but no banner comes
#   resume-sshd HOST
#   rekey HOST             new host key, not in known_hosts
#   unrekey HOST           the host key of known_hosts again
#   deny-key HOST          the client key is no longer accepted
#   allow-key HOST
# disk:
#   full HOST [SIZE [DIR]] a tmpfs of SIZE (64k) over DIR (the home directory)
#   unfull HOST [DIR]
# clock, of every process that is started over SSH from then on:
#   skew HOST SECONDS      it is that much ahead (behind, if negative)
#   unskew HOST
# processes and the whole host:
#   kill-procs HOST [PATTERN]  SIGKILL to the user's processes on HOST, but not
#                          to its SSH sessions; PATTERN as grep -E of the command
#   crash HOST             power loss: link down, then every process gone
#   boot HOST              start it again, with the same disk
#   status
set -euo pipefail
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
usage() { sed -n '2,/^set/s/^# \{0,1\}//p' "$0" >&2; exit 2; }
[ $# -ge 1 ] || usage
verb=$1; host=${2:-}
[ -e "$D/conf" ] || die "no testbed in $D"

if [ "$verb" = status ]; then
  for h in "$D"/hosts/*; do
    h=${h##*/}
    if pid=$(pid_of "$h"); then echo "$h up pid=$pid ip=$(node_ip "$h")"; else echo "$h down"; fi
  done
  exit 0
fi
is_host "$host" || die "no such host: '$host'"

# the rules live in the host's own namespace, one table per testbed
nft_rule() {
  in_net "$host" nft -f - <<RULES
add table inet fault
add chain inet fault in { type filter hook input priority 0; }
add chain inet fault out { type filter hook output priority 0; }
$1
RULES
}

undelay() {
  kill_recorded "$host.delay"
  in_switch ip link del "d-$host" 2>/dev/null || true
  in_switch ip link set "$host" master br0 2>/dev/null || true
}

# by the pid file in the host's own PID namespace; returns when it is gone
stop_sshd() {
  in_host "$host" sh -c 'p=$(cat /run/sshd.pid 2>/dev/null) && kill -TERM "$p" && kill -CONT "$p" || exit 0
    while kill -0 "$p" 2>/dev/null; do sleep 0.02; done'
}
restart_sshd() { stop_sshd; start_sshd "$host"; }

case $verb in
  cut)  in_switch ip link set "$host" down; forget "$host" ;;
  drop) nft_rule 'add rule inet fault in iifname eth0 drop
add rule inet fault out oifname eth0 drop' ;;
  isolate) nft_rule "add rule inet fault in iifname eth0 ip saddr != $LAPTOP_IP drop
add rule inet fault out oifname eth0 ip daddr != $LAPTOP_IP drop" ;;
  block) [[ ${3:-} =~ ^[0-9]+$ ]] || usage
    nft_rule "add rule inet fault in iifname eth0 tcp dport $3 drop" ;;
  slow) [[ ${3:-} =~ ^([0-9]+)(ms)?$ ]] || usage
    ms=${BASH_REMATCH[1]}
    undelay
    in_switch ip link add "d-$host" type veth peer name "e-$host"
    in_switch ip link set "e-$host" up
    in_switch ip link set "$host" nomaster
    in_switch ip link set "d-$host" master br0 up
    setsid nsenter -t "$(pid_of switch)" -n python3 "$HERE/delay.py" "$host" "e-$host" "$ms" \
      </dev/null >"$D/log/$host.delay.log" 2>&1 &
    record "$host.delay" $!
    until grep -q ready "$D/log/$host.delay.log"; do
      pid_of "$host.delay" >/dev/null || die "delay.py failed, see $D/log/$host.delay.log"
      sleep 0.02
    done ;;
  rate) [ $# -eq 3 ] || usage
    in_switch tc qdisc replace dev "$host" root tbf rate "$3" burst 32kb latency 200ms
    in_net "$host" tc qdisc replace dev eth0 root tbf rate "$3" burst 32kb latency 200ms ;;
  heal)
    in_net "$host" nft delete table inet fault 2>/dev/null || true
    undelay
    in_switch tc qdisc del dev "$host" root 2>/dev/null || true
    in_net "$host" tc qdisc del dev eth0 root 2>/dev/null || true
    in_switch ip link set "$host" up
    in_net "$host" ip neigh flush dev eth0
    forget "$host" ;;

  stop-sshd) stop_sshd ;;
  start-sshd) start_sshd "$host" ;;
  hang-sshd) in_host "$host" sh -c 'kill -STOP "$(cat /run/sshd.pid)"' ;;
  resume-sshd) in_host "$host" sh -c 'kill -CONT "$(cat /run/sshd.pid)"' ;;
  rekey)
    [ -e "$D/hosts/$host/key.orig" ] || cp -p "$D/hosts/$host/ssh/ssh_host_ed25519_key" "$D/hosts/$host/key.orig"
    host_key "$host"
    restart_sshd ;;
  unrekey)
    key=$D/hosts/$host/ssh/ssh_host_ed25519_key
    if [ -e "$D/hosts/$host/key.orig" ]; then
      mv "$D/hosts/$host/key.orig" "$key"
      ssh-keygen -y -f "$key" > "$key.pub" # the workers of the TPU testbed publish it
    fi
    restart_sshd ;;
  deny-key) : > "$D/hosts/$host/ssh/authorized_keys/$RUSER" ;;
  allow-key) cp "$D/client/id_ed25519.pub" "$D/hosts/$host/ssh/authorized_keys/$RUSER" ;;

  full) in_host "$host" mount -t tmpfs -o "size=${3:-64k},uid=$RUID,gid=$RUID,mode=755" tmpfs "${4:-/home/$RUSER}" ;;
  unfull) in_host "$host" umount -l "${3:-/home/$RUSER}" ;;

  skew) [[ ${3:-} =~ ^-?[0-9]+$ ]] || usage
    cc -O1 -shared -fPIC -o "$D/hosts/$host/ssh/skewed_clock.so" "$HERE/skewed_clock.c" -ldl
    sed -i '/^SetEnv LD_PRELOAD/d' "$D/hosts/$host/ssh/sshd_config"
    echo "SetEnv LD_PRELOAD=/etc/ssh/skewed_clock.so CLOCK_SKEW_S=$3" >> "$D/hosts/$host/ssh/sshd_config"
    restart_sshd ;;
  unskew)
    sed -i '/^SetEnv LD_PRELOAD/d' "$D/hosts/$host/ssh/sshd_config"
    restart_sshd ;;

  kill-procs)
    # inside the host's PID namespace only its own processes exist
    in_host "$host" bash -c '
      for d in /proc/[0-9]*; do
        [ "$(stat -c %u "$d" 2>/dev/null)" = "$1" ] || continue
        cmd=$(tr "\0" " " < "$d/cmdline" 2>/dev/null) || continue
        case $cmd in "sshd: "*) continue ;; esac
        [ -z "$2" ] || grep -qE -- "$2" <<< "$cmd" || continue
        kill -KILL "${d#/proc/}" 2>/dev/null && echo "killed ${d#/proc/}: $cmd" || true
      done' bash "$RUID" "${3:-}" ;;
  crash)
    in_switch ip link set "$host" down
    kill_recorded "$host.delay"; kill_recorded "$host"; kill_recorded "$host.outer" ;;
  boot)
    pid_of "$host" >/dev/null && die "$host is up"
    boot_host "$host" ;;
  *) usage ;;
esac
