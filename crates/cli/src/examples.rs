//! What `--help` shows below the options of each command: examples, and what must be known to use them. Owns text.

pub const SERVE_EXAMPLES: &str = "\
Examples:
  256 MiB of RAM, then up to 10 GiB in /var/tmp (the defaults):
    spillway serve --image debian.raw --vhost-user /run/vm1.sock
  RAM only; a write that finds it full fails with ENOSPC instead of waiting:
    spillway serve --image debian.raw --mode ram --ram 2G --full fail --vhost-user /run/vm1.sock
  NBD, for tools: nbdinfo 'nbd+unix:///?socket=/run/vm1.nbd'
    spillway serve --image debian.qcow2 --nbd /run/vm1.nbd --control /run/vm1.ctl
  For libvirt, whose QEMU runs as another user:
    spillway serve --image debian.raw --vhost-user /run/vm1.sock --socket-mode 0660 --socket-group libvirt-qemu
  A machine that keeps what it writes, also across power loss (up to its last FLUSH):
    spillway serve --mode persistent --image debian.raw --disk /var/lib/vm1.disk --vhost-user /run/vm1.sock
  A full copy of the image on a fast disk, written in place and gone with the machine:
    cp --sparse=always debian.raw /fast/vm1.copy
    spillway serve --mode ephemeral --disk /fast/vm1.copy --vhost-user /run/vm1.sock

What is written lives as long as this process: FLUSH completes when all earlier writes have
completed, and nothing is promised across power loss. Modes direct and ephemeral honour FLUSH by
fdatasync, and what was written goes with them. Mode persistent keeps it.";

pub const RUN_EXAMPLES: &str = "\
Examples:
  spillway run --image debian.qcow2 --memory 2G --vcpus 2
  spillway run --image debian.raw --kernel vmlinuz --initrd initrd.img --append 'root=/dev/vda console=ttyS0'
  With a network for the guest (everything after -- goes to QEMU):
    spillway run --image debian.qcow2 -- -nic user,model=virtio-net-pci
Ctrl-C goes to the guest; Ctrl-A X ends the machine, Ctrl-A C is QEMU's monitor.";

pub const STATS_EXAMPLES: &str = "\
Examples:
  spillway stats /run/vm1.ctl
  spillway stats /run/vm1.ctl --json | jq .planes.overflow.written_bytes
  spillway stats /run/vm1.ctl --names mcsio --json --watch
  spillway stats /run/vm1.ctl --prometheus > /var/lib/node_exporter/vm1.prom
  spillway stats /run/vm1.ctl --dirty
Every name is explained in docs/counters.md.

What fills a cache: --dirty lists where the guest wrote most since the last reset, in bytes from the
start of the disk. From an offset to the files there, inside a Linux guest with ext4, as root:
  dev=vda1 offset=1234173952 length=2097152                 a line of the list, and the partition
  start=$(($(cat /sys/class/block/$dev/start || echo 0) * 512))
  size=$(debugfs -R stats /dev/$dev | awk '/^Block size/ {print $3}')
  first=$(((offset - start) / size)) last=$(((offset - start + length) / size - 1))
  debugfs -R \"icheck $(seq -s ' ' $first $last)\" /dev/$dev | awk '$2+0 {print $2}' | sort | uniq -c
  debugfs -R 'ncheck INODE' /dev/$dev                       the names of the inodes found
The other way round, 'filefrag -v -b4096 FILE' shows the blocks of 4 KiB that a file has in its file
system.";

pub const RESET_EXAMPLES: &str = "\
Examples:
  spillway reset /run/vm1.ctl
  Disconnect the machine first (it loses its disk):
    spillway reset /run/vm1.ctl --force
  A disk of mode persistent, whose data would be lost for good:
    spillway reset /run/vm1.ctl --discard-data";

pub const SET_EXAMPLES: &str = "\
What is named changes at once and together; if one of it cannot be, nothing does, and the reason is said. A smaller RAM
tier is evicted to the overflow and its memory given back within seconds; one that the overflow has no room for is refused.

Examples:
  spillway set /run/vm1.ctl --ram 512M
  Room for a disk that is full, and a machine that waits for it:
    spillway set /run/vm1.ctl --overflow 20G
  Let writes fail instead:
    spillway set /run/vm1.ctl --full fail";

pub const EVENTS_EXAMPLES: &str = "\
Kinds: warning, critical, normal (how full), full, room, first-overflow, degraded, recovered, overflow-write-failed,
overflow-read-failed, checksum-mismatch, summary-unusable, image-damaged, worker-died, worker-ended, worker-serves, upgrade, upgraded, no-upgrade,
reset, limits, client, notice.

Examples:
  spillway events /run/vm1.ctl
  spillway events /run/vm1.ctl --json | jq --unbuffered -r 'select(.kind == \"critical\").text'";

pub const EVENT_EXAMPLES: &str = "\
spillwayd knows its last 4,096 events; those of before its start are in its log. With --json each is one JSON object a line:
number, time, kind, object, text. 'spillway events' follows a single disk.

Examples:
  spillway event --kind failed --kind crashed
  spillway event --follow --last 0 --object machine/desk-001
  spillway event --follow --json | jq --unbuffered -r 'select(.object == \"host\").text'";

pub const TOP_EXAMPLES: &str = "\
Keys: q ends, left and right choose the column to sort by, r turns the order, / filters, tab shows catalogs or machines.

Examples:
  spillway top --sort full\\ in
  spillway top --by catalog --once
  spillway top --json | jq '.rows[] | select(.fill > 0.8) | .name'";

pub const DOCTOR_EXAMPLES: &str = "\
Each line is ok, a notice (it works, and could be better) or a problem; what to do is below. The exit code is 1 if there is a problem.

Examples:
  sudo spillway doctor
  spillway doctor --json | jq '.checks[] | select(.state != \"ok\")'";

pub const UPGRADE_EXAMPLES: &str = "\
The program is started beside the one that serves and asked what it is. If it fits, what was accepted is completed, and
the new one goes on with all that was written and with the VMM's open connection. NBD clients must connect again. If it
does not fit, or cannot serve, the old one goes on. Only the user that serves, and root, may do this.

Examples:
  The version that was just installed takes over:
    spillway upgrade /run/vm1.ctl
  Another one:
    spillway upgrade /run/vm1.ctl --binary /opt/spillway-2/spillway-worker";

pub const ATTACH_EXAMPLES: &str = "\
Example:
  spillway attach --vhost-user /run/vm1.sock --for libvirt";
