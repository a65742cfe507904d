#!/bin/bash
# Brings up N hosts (default 4) as namespaces on this machine, each with sshd.
#
#   up.sh [N]             start what is not running
#   up.sh --install-only  only install the missing Debian packages
#
#   HOSTS_TESTBED_DIR  state directory            (/tmp/hosts-testbed)
#   HOSTS_N            number of hosts            (4)
#   HOSTS_VENV         virtual environment every host sees read-only, together
#                      with the interpreter it was made from
#   HOSTS_SHARE        more read-only paths for every host, separated by ':'
#   HOSTS_SLOTS        slots per host in the hostfile (1)
#   HOSTS_LOOPBACK_NAME=1  hosts resolve their own name to 127.0.1.1, as a stock
#                      Debian or Ubuntu install does
#   HOSTS_PREFIX       first three octets of the testbed's network (10.77.0)
#
# Running it again with the same settings does nothing if all is up, and boots
# what is down; with other settings it rebuilds.  down.sh removes everything.
set -euo pipefail
HOSTS_FROM_ENV=1
. "$(dirname "${BASH_SOURCE[0]}")/lib.sh"
install_only=
if [ "${1:-}" = --install-only ]; then install_only=1; shift; fi
N=${1:-${HOSTS_N:-4}}
[ "$(id -u)" = 0 ] || die "needs root"
[ "$N" -ge 1 ] && [ "$N" -le 200 ] || die "N out of range"

exec 9>"$D.lock"; flock 9

# --- Debian packages
declare -A pkg=([sshd]=openssh-server [ip]=iproute2 [mpirun]=openmpi-bin [mpirun.mpich]=mpich
                [pdsh]=pdsh [rsync]=rsync [nft]=nftables [ps]=procps [cc]="gcc libc6-dev")
missing=()
for tool in "${!pkg[@]}"; do
  PATH=$PATH:/usr/sbin:/sbin command -v "$tool" >/dev/null || missing+=(${pkg[$tool]})
done
if [ ${#missing[@]} -gt 0 ]; then
  # keep the package from starting a daemon on this machine itself
  made=
  if [ ! -e /usr/sbin/policy-rc.d ]; then
    printf '#!/bin/sh\nexit 101\n' > /usr/sbin/policy-rc.d
    chmod 755 /usr/sbin/policy-rc.d; made=1
  fi
  export DEBIAN_FRONTEND=noninteractive
  apt-get install -qq -y --no-install-recommends "${missing[@]}" >/dev/null 9>&- ||
    { apt-get update -qq 9>&- && apt-get install -qq -y --no-install-recommends "${missing[@]}" >/dev/null 9>&-; }
  [ -z "$made" ] || rm -f /usr/sbin/policy-rc.d
fi

[ -z "$install_only" ] || exit 0

# --- settings; rebuild when they changed
share=()
if [ -n "${HOSTS_VENV:-}" ]; then
  venv=$(cd "$HOSTS_VENV" && pwd)
  share+=("$venv")
  base=$(dirname "$(readlink -f "$venv/bin/python")")
  base=${base%/bin}
  case $base in /usr|/usr/local) ;; *) share+=("$base") ;; esac
fi
IFS=: read -r -a more <<< "${HOSTS_SHARE:-}"
for p in "${more[@]}"; do [ -z "$p" ] || share+=("$p"); done
settings="N=$N PREFIX=$PREFIX RUSER=$RUSER RUID=$RUID SLOTS=${HOSTS_SLOTS:-1} LB=${HOSTS_LOOPBACK_NAME:-} SHARE=${share[*]:-}"
if [ -d "$D/pids" ] && { [ "$(cat "$D/settings" 2>/dev/null)" != "$settings" ] ||
     ! pid_of switch >/dev/null || ! pid_of laptop >/dev/null; }; then
  HOSTS_LOCKED=1 bash "$HERE/down.sh" 9>&-
fi

if [ ! -e "$D/settings" ]; then
  mkdir -p "$D"/{pids,log,client,hosts}
  chmod 755 "$D"; chmod 700 "$D/client"
  printf '%s\n' "${share[@]}" > "$D/share"
  ssh-keygen -q -t ed25519 -N '' -C testbed -f "$D/client/id_ed25519"

  { echo "127.0.0.1 localhost"; echo "$LAPTOP_IP laptop"
    for i in $(seq "$N"); do echo "$(node_ip "$i") node$i"; done; } > "$D/client/hosts"
  echo "options timeout:1 attempts:1" > "$D/client/resolv.conf"
  : > "$D/client/known_hosts"; : > "$D/client/hostfile"
  cat > "$D/client/ssh_config" <<CONF
Host node*
    User $RUSER
    IdentityFile $D/client/id_ed25519
    IdentitiesOnly yes
    UserKnownHostsFile $D/client/known_hosts
    GlobalKnownHostsFile /dev/null
    StrictHostKeyChecking yes
    PasswordAuthentication no
    ConnectTimeout 10
    LogLevel ERROR
CONF

  for i in $(seq "$N"); do
    name=node$i; H=$D/hosts/$name
    mkdir -p "$H"/{etc,ssh/authorized_keys,home,tmp,vartmp,log,root}
    chmod 1777 "$H/tmp" "$H/vartmp"
    chown "$RUID:$RUID" "$H/home"; chmod 755 "$H/home"
    # accounts as on this machine, but nobody has a password
    { grep -v "^$RUSER:" /etc/passwd; echo "$RUSER:x:$RUID:$RUID::/home/$RUSER:/bin/bash"; } > "$H/etc/passwd"
    { grep -v "^$RUSER:" /etc/group; echo "$RUSER:x:$RUID:"; } > "$H/etc/group"
    echo "$RUSER:*:19000:0:99999:7:::" > "$H/etc/shadow"; chmod 600 "$H/etc/shadow"
    echo "$name" > "$H/etc/hostname"
    cp "$D/client/resolv.conf" "$H/etc/resolv.conf"
    if [ -n "${HOSTS_LOOPBACK_NAME:-}" ]; then
      { echo "127.0.1.1 $name"; grep -v " $name\$" "$D/client/hosts"; } > "$H/etc/hosts"
    else
      cp "$D/client/hosts" "$H/etc/hosts"
    fi
    host_key "$name"
    cp "$D/client/id_ed25519.pub" "$H/ssh/authorized_keys/$RUSER"
    cat > "$H/ssh/sshd_config" <<CONF
HostKey /etc/ssh/ssh_host_ed25519_key
AuthorizedKeysFile /etc/ssh/authorized_keys/%u
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin no
UsePAM no
UseDNS no
PrintMotd no
PidFile /run/sshd.pid
Subsystem sftp internal-sftp
CONF
    echo "$name,$(node_ip "$i") $(cut -d' ' -f1,2 "$H/ssh/ssh_host_ed25519_key.pub")" >> "$D/client/known_hosts"
    printf 'Host %s\n    HostName %s\n' "$name" "$(node_ip "$i")" >> "$D/client/ssh_config"
    echo "$name slots=${HOSTS_SLOTS:-1}" >> "$D/client/hostfile"
  done
  for i in $(seq "$N"); do cp "$D/client/known_hosts" "$D/hosts/node$i/ssh/ssh_known_hosts"; done

  # --- switch and laptop
  hold switch --net sleep infinity 9>&-
  hold laptop --net --uts --mount --propagation slave sh -ec '
    hostname laptop
    # a copy, for the reason given in host-init.sh; with it plain ssh, and
    # whatever calls ssh, works on the laptop without options
    mkdir "$1/client/etc"
    mount -t tmpfs -o mode=755 tmpfs "$1/client/etc"
    cp -a /etc/. "$1/client/etc"
    cp --remove-destination "$1/client/hosts" "$1/client/resolv.conf" "$1/client/etc"
    cp "$1/client/ssh_config" "$1/client/etc/ssh/ssh_config"
    mount --bind "$1/client/etc" /etc
    : > "$1/client/ready"; exec sleep infinity' sh "$D" 9>&-
  for _ in $(seq 1200); do [ -e "$D/client/ready" ] && break; sleep 0.05; done
  [ -e "$D/client/ready" ] || die "laptop did not come up, see $D/log/laptop.log"
  in_switch sysctl -qw net.ipv6.conf.all.disable_ipv6=1 2>/dev/null || true
  in_switch ip link add br0 type bridge stp_state 0 forward_delay 0 mcast_snooping 0
  in_switch ip link set br0 up
  plug laptop "$LAPTOP_IP"
  printf 'PREFIX=%q\nRUSER=%q\nRUID=%q\n' "$PREFIX" "$RUSER" "$RUID" > "$D/conf"
  echo "$settings" > "$D/settings"
fi

for i in $(seq "$N"); do
  pid_of "node$i" >/dev/null || boot_host "node$i" 9>&-
done

# --- every host must accept the key, with strict host key checking
for i in $(seq "$N"); do
  "$HERE/enter.sh" laptop ssh -n -o BatchMode=yes "node$i" true 9>&- & waits[i]=$!
done
for i in $(seq "$N"); do wait "${waits[i]}" || die "node$i does not answer over SSH, see $D/hosts/node$i/log/sshd.log"; done
echo "hosts-testbed: $N hosts up, state in $D"
