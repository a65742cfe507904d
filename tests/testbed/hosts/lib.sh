# Shared by up.sh, down.sh, fault.sh and enter.sh.  Source it, do not run it.
#
# Layout of the testbed (state in $D):
#   switch   a network namespace holding the bridge br0 and one veth end per host
#   laptop   network + mount + UTS namespace; same files as this machine, but
#            with its own /etc/hosts, /etc/resolv.conf and /etc/ssh/ssh_config
#   node1..N one set of net/mount/UTS/IPC/PID namespaces per host, with its own
#            read-only root, home, /tmp, /var/tmp, /run, /dev/shm and sshd
#
# A namespace lives as long as its holder process; $D/pids/NAME records
# "PID STARTTIME" of the holder, and nothing but recorded pids is signalled.

D=${HOSTS_TESTBED_DIR:-/tmp/hosts-testbed}
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
PREFIX=${HOSTS_PREFIX:-10.77.0}
RUSER=${HOSTS_USER:-trainer}
RUID=${HOSTS_UID:-7700}
# once the testbed is up, what it was made with counts (up.sh compares first)
if [ -z "${HOSTS_FROM_ENV:-}" ] && [ -r "$D/conf" ]; then . "$D/conf"; fi

die() { echo "hosts-testbed: $*" >&2; exit 1; }

node_ip() { echo "$PREFIX.$((10 + ${1#node}))"; }
LAPTOP_IP=$PREFIX.2

# start time of a process in clock ticks; empty if there is none or a zombie
starttime() {
  local s
  s=$(cat "/proc/$1/stat" 2>/dev/null) || return 0
  s=${s##*) }
  # shellcheck disable=SC2086
  set -- $s
  [ "$1" = Z ] || echo "${20}"
}

record() { echo "$2 $(starttime "$2")" > "$D/pids/$1"; }

# pid of a recorded holder if it is still the same process, else fail
pid_of() {
  local pid st
  [ -r "$D/pids/$1" ] || return 1
  read -r pid st < "$D/pids/$1" || return 1
  [ -n "$st" ] && [ "$(starttime "$pid")" = "$st" ] || return 1
  echo "$pid"
}

kill_recorded() {
  local pid i
  if pid=$(pid_of "$1"); then
    kill -KILL "$pid" 2>/dev/null || true
    for i in $(seq 1200); do
      pid_of "$1" >/dev/null || break
      sleep 0.05
    done
  fi
  rm -f "$D/pids/$1"
}

in_switch() { local p; p=$(pid_of switch) || die "switch is not up"; nsenter -t "$p" -n -- "$@"; }
in_host()   { local p; p=$(pid_of "$1") || die "$1 is not up"; shift; nsenter -t "$p" -a -- "$@"; }
in_net()    { local p; p=$(pid_of "$1") || die "$1 is not up"; shift; nsenter -t "$p" -n -- "$@"; }

is_host() { [[ $1 =~ ^node[0-9]+$ ]] && [ -d "$D/hosts/$1" ]; }

# start a holder process in new namespaces; the rest of the arguments go to unshare
hold() {
  local name=$1; shift
  setsid unshare "$@" </dev/null >>"$D/log/$name.log" 2>&1 &
  record "$name" $!
  # until the holder has left this network namespace, commands meant for its
  # own would act on ours
  local i
  for i in $(seq 1500); do
    [ "$(readlink "/proc/$!/ns/net")" = "$(readlink /proc/$$/ns/net)" ] || return 0
    sleep 0.02
  done
  die "$name did not enter its namespaces, see $D/log/$name.log"
}

# plug NAME's eth0 into the bridge; the bridge-side end is called like the host
plug() {
  local name=$1 ip=$2 pid sw
  pid=$(pid_of "$name"); sw=$(pid_of switch)
  nsenter -t "$sw" -n ip link del "$name" 2>/dev/null || true
  # a fixed hardware address, so that a rebooted host is found at once
  nsenter -t "$sw" -n ip link add "$name" type veth \
    peer name eth0 address "$(printf '02:00:00:00:00:%02x' "${ip##*.}")" netns "$pid"
  nsenter -t "$sw" -n ip link set "$name" master br0 up
  nsenter -t "$pid" -n sysctl -qw net.ipv6.conf.all.disable_ipv6=1 2>/dev/null || true
  nsenter -t "$pid" -n ip link set lo up
  nsenter -t "$pid" -n ip addr add "$ip/24" dev eth0
  nsenter -t "$pid" -n ip link set eth0 up
}

# make every peer of HOST forget its hardware address
forget() {
  local h
  for h in laptop $(ls "$D/hosts"); do
    [ "$h" = "$1" ] || ! pid_of "$h" >/dev/null ||
      in_net "$h" ip neigh flush to "$(node_ip "$1")" dev eth0
  done
}

boot_host() {
  local name=$1 outer inner i
  rm -f "$D/hosts/$name/ready"
  hold "$name.outer" --net --mount --uts --ipc --pid --fork --kill-child \
    bash "$HERE/host-init.sh" "$D" "$name" "$RUSER" "$RUID"
  outer=$(pid_of "$name.outer") || die "cannot start $name, see $D/log/$name.outer.log"
  for i in $(seq 1200); do
    [ -e "$D/hosts/$name/ready" ] && break
    pid_of "$name.outer" >/dev/null || die "$name died, see $D/log/$name.outer.log"
    sleep 0.05
  done
  [ -e "$D/hosts/$name/ready" ] || die "$name did not become ready"
  inner=$(ps -o pid= --ppid "$outer" | tr -d ' ')
  record "$name" "$inner"
  plug "$name" "$(node_ip "$name")"
  start_sshd "$name"
}

# returns when it listens and has said which process it is: sshd goes to the background before that
start_sshd() {
  in_host "$1" sh -c 'kill -0 "$(cat /run/sshd.pid 2>/dev/null)" 2>/dev/null || /usr/sbin/sshd -E /var/log/sshd.log || exit
    for i in $(seq 1500); do
      grep -q ":0016 00000000:0000 0A" /proc/net/tcp && kill -0 "$(cat /run/sshd.pid 2>/dev/null)" 2>/dev/null && exit 0
      sleep 0.02
    done; exit 1'
}

# new host key for a host; known_hosts is only written by up.sh
host_key() {
  rm -f "$D/hosts/$1/ssh/ssh_host_ed25519_key"*
  ssh-keygen -q -t ed25519 -N '' -C "$1" -f "$D/hosts/$1/ssh/ssh_host_ed25519_key"
}
