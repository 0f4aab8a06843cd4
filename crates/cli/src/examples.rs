//! What `--help` shows below the options of each command: examples, and what must be known to use them. Owns text.

pub const SERVE_EXAMPLES: &str = "\
Modes:
  ram+overflow  RAM tier; when it fills, cold blocks move to the overflow file (default)
  ram           RAM tier only
  overflow      overflow file only
  direct        a difference file, each block in place, past the page cache
  persistent    the disk's own file (--disk), kept across restarts and power loss
  ephemeral     a full copy of the image (--disk), deleted with the disk

Sizes are binary: 64K, 256M, 10G, 1T. A number without a unit is bytes.

Examples:
  256 MiB of RAM, then up to 10 GiB in /var/tmp (the defaults):
    spillway serve --image debian.raw --vhost-user /run/vm1.sock
  RAM only; when it is full, writes fail with ENOSPC instead of waiting:
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

In all modes but persistent, written data is lost when this process ends. FLUSH waits for earlier
writes; only modes direct, ephemeral and persistent also call fdatasync. Only mode persistent keeps
data across power loss, up to the last completed FLUSH.";

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
The given limits change together and at once; if one of them is refused, none changes. Limits that are not given stay as
they are: the defaults above are those of 'spillway serve'. If the RAM tier gets smaller, its cold blocks are evicted to the
overflow and the memory is released within seconds; a limit is refused if the overflow has no space for those blocks.

Examples:
  spillway set /run/vm1.ctl --ram 512M
  Add space to a disk that is full, so that its machine continues:
    spillway set /run/vm1.ctl --overflow 20G
  Let writes fail instead:
    spillway set /run/vm1.ctl --full fail";

pub const EVENTS_EXAMPLES: &str = "\
Kinds: warning, critical, normal (thresholds of use), full, space-available, first-overflow, degraded, recovered, overflow-write-failed,
overflow-read-failed, checksum-mismatch, summary-unusable, image-damaged, chunks-missing, chunks-arrive, worker-died, worker-ended, worker-serves, upgrade, upgraded, no-upgrade,
reset, limits, client, notice.

Examples:
  spillway events /run/vm1.ctl
  spillway events /run/vm1.ctl --json | jq --unbuffered -r 'select(.kind == \"critical\").text'";

pub const EVENT_EXAMPLES: &str = "\
spillwayd returns up to its last 4,096 events and keeps a week of them on disk. With --json each is one JSON object a line:
id, time, kind, object, text. 'spillway events' follows a single disk.

Examples:
  spillway event --kind failed --kind crashed
  spillway event --follow --last 0 --object machine/desk-001
  spillway event --follow --json | jq --unbuffered -r 'select(.object == \"host\").text'";

pub const TOP_EXAMPLES: &str = "\
Keys: q quits, left and right choose the column to sort by, r reverses the order, / filters, tab switches between machines
and catalogs.

Examples:
  spillway top --sort full\\ in
  spillway top --by catalog --once
  spillway top --json | jq '.rows[] | select(.fill > 0.8) | .name'";

pub const CONSOLE_EXAMPLES: &str = "\
The console is served by spillwayd itself. This command lets a browser use it with the rights of who runs the command, by an
address that works once and only on this host. With 'spillwayd --listen', open https://HOST:PORT/console/ and log in with a
token instead.

Examples:
  spillway console
  spillway console --port 9080          # and on the other computer: ssh -L 9080:127.0.0.1:9080 HOST";

pub const DOCTOR_EXAMPLES: &str = "\
Each line is ok, a notice (it works, and could be better) or a problem, with the remedy below it. The exit code is 1 if
there is a problem.

Examples:
  sudo spillway doctor
  spillway doctor --json | jq '.checks[] | select(.state != \"ok\")'";

pub const UPGRADE_EXAMPLES: &str = "\
The new program is started beside the one that serves, and reports its version. If the version is compatible, the old
program completes its accepted requests, and the new one continues with the written data and the VMM's connection. NBD
clients must reconnect. If it is not compatible or cannot serve, the old program continues. Only the user that serves the
disk, and root, may do this.

Examples:
  The version that was just installed takes over:
    spillway upgrade /run/vm1.ctl
  A version in another folder:
    spillway upgrade /run/vm1.ctl --binary /opt/spillway-2/spillway-worker";

pub const ATTACH_EXAMPLES: &str = "\
Example:
  spillway attach --vhost-user /run/vm1.sock --for libvirt";
