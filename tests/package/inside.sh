#!/bin/sh
# What is done with the package inside the guest, whose second serial port is told of each part that went well. The
# first thing that is not as it is to be ends it, and is shown.
set -eu
exec 3>/dev/ttyS1 >/run/work.log 2>&1
show() {
    tail -n 30 /run/work.log
    systemctl --no-pager status spillwayd || true
    journalctl --no-pager -q -n 40
}
trap '[ $? = 0 ] || show >&3 2>&1' EXIT
set -x

# With the seconds since the boot, for whoever wonders what takes so long.
say() { echo "$(cut -d" " -f1 /proc/uptime) $*" >&3; }
of() { systemctl show --value --property "$1" "${2-spillwayd}"; }
figure() { spillway machine show "$1" --json | tr -d ' ,' | sed -n "s/^\"$2\"://p"; }
until_so() {
    tries=0
    until "$@"; do
        [ $tries -lt 60 ]
        tries=$((tries + 1))
        # Each look takes a guest without KVM half a second of its processor.
        sleep 2
    done
}
is() { [ "$(of "$1")" = "$2" ]; }
# A process that is no child of ours stays for a moment after its end, until systemd has seen it.
is_gone() { [ ! -e "/proc/$1" ]; }
# A unit wrote it to the journal, where it comes when journald finds time.
wrote() { journalctl --sync && journalctl -u "$1" | grep "$2"; }
is_another() { [ "$(of MainPID)" != "$1" ] && [ "$(of MainPID)" != 0 ]; }
# Another setting of the unit than the package's, from the daemon's next start on.
setting() {
    mkdir -p /run/systemd/system/spillwayd.service.d
    printf '[Service]\n%s\n' "$2" >"/run/systemd/system/spillwayd.service.d/$1.conf"
    systemctl daemon-reload
}
# The machine's disk has not noticed.
lives_on() {
    [ "$(figure desk-001 disk_pid)" = "$disk" ]
    spillway machine list --json | grep '"phase": "running"'
    spillway stats /var/lib/spillway/run/machines/desk-001/disk.ctl --json >/dev/null
}

# In the place of QEMU's, which the guest does not have: it knows what is raw.
cat >/usr/bin/qemu-img <<'QEMU'
#!/bin/sh
for last; do :; done
case $1 in
info) echo "{ \"virtual-size\": $(stat -L -c %s "$last") }" ;;
convert)
    for argument; do
        case $argument in json:*) from=$(echo "$argument" | sed 's/.*"filename":"\([^"]*\)".*/\1/') ;; esac
    done
    cat "$from" >"$last"
    ;;
esac
QEMU
chmod 755 /usr/bin/qemu-img
head -c 4194304 /dev/urandom >/root/image.raw

dpkg -i --force-depends /run/payload/spillway.deb
[ "$(systemctl is-enabled spillwayd.service)" = enabled ]
[ "$(systemctl is-enabled spillwayd.socket || true)" = disabled ]
systemctl is-active spillwayd
systemctl is-active spillway-machines
units="spillwayd.service spillwayd.socket spillway-machines.service spillway.slice"
# shellcheck disable=SC2086 # words
systemd-analyze verify $units >/run/verify 2>&1 || { cat /run/verify; false; }
[ -z "$(grep -i spillway /run/verify)" ]
spillway store list | grep /var/lib/spillway/store
[ -s /usr/share/bash-completion/completions/spillway ]
[ -s /usr/share/man/man1/spillway.1.gz ]
[ -s /usr/share/man/man8/spillwayd.8.gz ]
say installed

echo 'SPILLWAYD_OPTIONS="--hypervisor none"' >/etc/default/spillwayd
systemctl restart spillwayd
spillway image import golden /root/image.raw --format raw
spillway catalog create desk --image golden --count 1 --ram 16M --network none
spillway machine start desk-001 --wait
disk=$(figure desk-001 disk_pid)
place=$(cut -d: -f3 "/proc/$disk/cgroup")
case $place in /spillway.slice/spillway-desk-001-disk-????????.scope) ;; *) false ;; esac
[ "$(wc -l <"/sys/fs/cgroup$place/cgroup.procs")" = 2 ]
[ "$(cat "/sys/fs/cgroup$place/memory.swap.max")" = 0 ]
[ "$(cat "/sys/fs/cgroup$place/io.weight")" = "default 100" ]
[ "$(cat "/sys/fs/cgroup/spillway.slice/memory.swap.max")" = 0 ]
[ "$(tail -c +38 /var/lib/spillway/run/machines/desk-001/disk.process | cut -d' ' -f1)" = "$disk" ]
# The unit's hardening leaves disks what they need: they would say what they miss.
[ -z "$(grep -E 'io_uring|system calls|AIO' /var/lib/spillway/run/machines/desk-001/disk.log)" ]
cat /var/lib/spillway/run/machines/desk-001/disk.log
grep '^NoNewPrivs:.1$' "/proc/$disk/status"
lives_on
say a machine has a scope

[ "$(of NFileDescriptorStore)" = 1 ]
until_so is StatusText "1 of 1 machines running"
# As long as it takes to see that there is none, on a busy host too.
setting pause RestartSec=10
daemon=$(of MainPID)
kill -KILL "$daemon"
# There is no daemon: who connects now waits.
until_so is MainPID 0
spillway machine list >/run/listed
grep desk-001 /run/listed
is_another "$daemon"
[ "$(of NRestarts)" = 1 ]
[ "$(of NFileDescriptorStore)" = 1 ]
lives_on
setting pause RestartSec=1
say killed

daemon=$(of MainPID)
# A reload is no end.
systemctl reload spillwayd
spillway store list >/dev/null
[ "$(of MainPID)" = "$daemon" ]
systemctl stop spillwayd
systemctl start spillwayd
is_another "$daemon"
lives_on
# What a VMM is given open comes through its scope.
[ "$(systemd-run --scope --quiet cat /dev/fd/9 9</etc/hostname)" = "$(cat /etc/hostname)" ]
daemon=$(of MainPID)
systemctl restart --no-block spillwayd
n=0
while [ $n -lt 4 ] || ! is_another "$daemon"; do
    spillway store list >/dev/null
    n=$((n + 1))
done
lives_on
[ "$(of NFileDescriptorStore)" = 1 ]
say restarted

setting watchdog WatchdogSec=30s
systemctl restart spillwayd
daemon=$(of MainPID)
kill -STOP "$daemon"
# For the next one: a busy host has good daemons killed after so few seconds.
setting watchdog WatchdogSec=2min
until_so is_another "$daemon"
wrote spillwayd 'Watchdog timeout'
lives_on
say watched

systemctl stop spillwayd
systemctl start spillwayd.socket
[ "$(of MainPID)" = 0 ]
lives_on
[ "$(of NFileDescriptorStore)" = 0 ]
daemon=$(of MainPID)
kill -KILL "$daemon"
lives_on
is_another "$daemon"
systemctl stop spillwayd.socket spillwayd.service
systemctl start spillwayd.service
lives_on
say activated

# As when the host goes down: the machine's end is asked for, and its scope is not ended before.
scope=$(systemctl list-units --plain --no-legend 'spillway-desk-001-disk-*.scope' | cut -d' ' -f1)
systemctl show --property Before "$scope" | grep -w spillway-machines.service
# Wherever the daemon listens.
echo 'SPILLWAYD_OPTIONS="--hypervisor none --socket /run/elsewhere.sock"' >/etc/default/spillwayd
systemctl restart spillwayd
export SPILLWAY_SOCKET=/run/elsewhere.sock
systemctl stop spillway-machines
spillway machine list --json | grep '"phase": "stopped"'
spillway host show | grep closed
if spillway machine start desk-001; then exit 1; fi
has_no_scope() { [ -z "$(systemctl list-units --plain --no-legend 'spillway-desk-001-*.scope')" ]; }
until_so has_no_scope
systemctl start spillway-machines
spillway host show | grep open
spillway machine start desk-001 --wait
disk=$(figure desk-001 disk_pid)
lives_on
say ended in order

# Of another version, as far as dpkg knows.
daemon=$(of MainPID)
echo 'SPILLWAYD_OPTIONS="--hypervisor none"' >/etc/default/spillwayd
unset SPILLWAY_SOCKET
dpkg -i --force-depends /run/payload/spillway.deb
is_another "$daemon"
grep none /etc/default/spillwayd
lives_on
say upgraded

# A VM of Proxmox, as its hook serves it.
mkdir -p /etc/spillway/vm
echo 'OPTIONS="--image /root/image.raw --format raw --ram 16M --overflow-dir /var/tmp"' >/etc/spillway/vm/101
hook=/usr/share/doc/spillway/examples/proxmox-hook
bash $hook 101 pre-start
spillway stats /run/spillway-vm/101.ctl | grep 'mode ram+overflow'
grep '^NoNewPrivs:.1$' "/proc/$(of MainPID spillway-vm-101)/status"
[ "$(cat /sys/fs/cgroup/system.slice/spillway-vm-101.service/memory.swap.max)" = 0 ]
# The sandbox leaves the disk what it needs: it would say what it misses.
journalctl --sync
[ -z "$(journalctl -u spillway-vm-101 | grep -E 'io_uring|system calls|AIO')" ]
bash $hook 101 post-stop
until_so test ! -e /run/spillway-vm/101.sock
until_so wrote spillway-vm-101 'Deactivated successfully'
rm -r /etc/spillway
say "a hook serves a disk"

# Without systemd-run the unit spares what is in its own control group.
mkdir /run/few
ln -s /bin/mkdir /run/few
setting path Environment=PATH=/run/few
systemctl restart spillwayd
wrote spillwayd 'machines get no scopes of their own'
spillway catalog scale desk 2
spillway machine start desk-002 --wait
other=$(figure desk-002 disk_pid)
[ "$(cut -d: -f3 "/proc/$other/cgroup")" = /system.slice/spillwayd.service ]
setting path Environment=
systemctl restart spillwayd
[ "$(figure desk-002 disk_pid)" = "$other" ]
spillway machine stop desk-002 --wait
until_so is_gone "$other"
lives_on

# By hand, in a delegated group.
systemd-run --unit byhand --property Delegate=yes --setenv PATH=/run/few \
    /usr/bin/spillwayd --state /root/byhand --socket /run/byhand.sock --hypervisor none
export SPILLWAY_SOCKET=/run/byhand.sock
until_so test -S $SPILLWAY_SOCKET
spillway image import golden /root/image.raw --format raw
spillway catalog create hand --image golden --count 1 --ram 16M --network none
spillway machine start hand-001 --wait
group=$(cut -d: -f3 "/proc/$(figure hand-001 disk_pid)/cgroup")
[ "$group" = /system.slice/byhand.service/spillway-hand-001-disk ]
[ "$(cat "/sys/fs/cgroup$group/memory.swap.max")" = 0 ]
[ "$(cut -d: -f3 "/proc/$(of MainPID byhand)/cgroup")" = /system.slice/byhand.service/spillwayd ]
systemctl stop byhand
unset SPILLWAY_SOCKET
say without systemd-run

dpkg -r --force-depends spillway
until_so is_gone "$disk"
[ -z "$(systemctl list-units --no-legend 'spillway*')" ]
[ ! -e /usr/bin/spillwayd ]
[ ! -e /run/spillway ]
[ -s /var/lib/spillway/state.db ]
dpkg -P spillway 2>/run/purge
grep 'there are images or disks in it' /run/purge
[ ! -e /etc/default/spillwayd ]
[ -s /var/lib/spillway/store/images/golden/1/disk.raw ]
rm -r /var/lib/spillway/store/images
dpkg-deb --control /run/payload/spillway.deb /run/control
/run/control/postrm purge
[ ! -e /var/lib/spillway ]
say removed
