//! What `--help` shows below the options of `spillway fleet`. Owns text.

pub const INIT: &str = "\
The name of the fleet is that of 'spillwayd --fleet etcd://.../NAME' of this host. Its records are in etcd below
/spillway/NAME/. Making it changes no machine.

Example:
  spillway fleet init && spillway fleet status";

pub const STATUS: &str = "\
States of the host that answers:
  member      it has a lease in etcd (15 s), which it renews
  connecting  it has not read the records yet
  no-fleet    there is no fleet of this name: 'spillway fleet init' makes it
  joining     it is about to get a lease
  isolated    it has no lease any more: its machines go on, except those with names of the fleet whose catalog says
              on_isolation = pause or stop. Other hosts decide whether they are replaced
  refused     it may not take part: the line below says why

'brake' says why silent hosts are not replaced. UNPLACED counts machines for which no host has space: 'spillway fleet
catalog show' says what is missing where. Both come from the placer, which is asked.

Exit code: 0 if the host is a member, 69 if it is not, others as in 'spillway --help'.

Examples:
  spillway fleet status
  spillway fleet status --json | jq -r '.catalogs[] | select(.unplaced > 0).name'";

pub const HOSTS: &str = "\
States of a host:
  alive     it renews its lease
  silent    its lease has ended; it is not lost yet
  isolated  its lease has ended, but another host reaches its daemon: it has lost etcd alone, and its machines are not replaced
  lost      its machines are replaced on other hosts
  absent    it was recorded, and has never had a lease
A host that is cordoned or draining says so behind its state; 'report cut': it has more catalogs and images than fit into its
report, and the fleet takes the missing catalogs for empty there. The placer knows which silent hosts are lost or isolated, and
why one of them is not replaced. While it does not answer, all are shown as silent.

MACHINES counts what the host has reported, of what it is to have; it reports at most every ten seconds. MEMORY is what
machines of the fleet take there, of what they may take.

Examples:
  spillway fleet hosts
  spillway fleet hosts --json | jq -r '.items[] | select(.state != \"alive\").name'";

pub const JOIN_TOKEN: &str = "\
The token has the address of etcd, and what this host shows to etcd: its certificate with the private key, the user and
the password. It is a secret: whoever has it can change what all hosts of the fleet do. Only the role admin gets one. To
give the other host a certificate of its own, start its spillwayd with --fleet-tls, too: that counts instead of what the
token has.

Example:
  On a host of the fleet, as root:
    (umask 077; spillway fleet join-token > fleet.token)
    scp fleet.token root@host-b: && rm fleet.token
  On the new one:
    install -D -m 0600 fleet.token /etc/spillway/fleet.token && rm fleet.token
  and start its spillwayd with --fleet-token /etc/spillway/fleet.token instead of --fleet and --fleet-tls.";

pub const PLACER: &str = "\
The placer is one of the daemons, which all elect. It writes to etcd how many machines each host is to have, and replaces
those of hosts that are lost. Switched off, it writes nothing, and another program may write these shares.

Examples:
  spillway fleet placer off             # nothing moves: for instance while switches are replaced
  spillway fleet placer on";

pub const HOST_SHOW: &str = "\
WANTED is what the host is to have of a catalog, and VERSION the version of its image. The columns behind them are what the
host has reported: its machines, and of them those that are ready, off, of that version (or about to take it at their next
start), claimed, and those that cannot be started.

Example:
  spillway fleet host show host-a --json | jq '.shares[] | select(.refused)'";

pub const CORDON: &str = "\
Example:
  spillway fleet host cordon host-a && spillway fleet host uncordon host-a";

pub const DRAIN: &str = "\
Other hosts get machines first; the host gives up its own as those get ready, unclaimed ones before claimed ones. A machine with
a name of the fleet is ended first, and then starts elsewhere. A claimed machine stays until it is released. Machines that keep data (dedicated ones, reset = never, data disks) stay: their data is
on this host alone, and they are never replaced.

'uncordon' ends a drain. With --wait, the exit code is 75 if machines are left when --timeout has passed; the drain goes on.

Examples:
  Before work on a host:
    spillway fleet host drain host-a --wait --timeout 1800
  After it:
    spillway fleet host uncordon host-a";

pub const DECLARE_DEAD: &str = "\
A host that is silent counts as lost by itself after the catalog's lost_after (45 s), unless too many are silent at once,
etcd had trouble, or another host still reaches it ('spillway fleet hosts' says which). This command is for those cases: you
have seen that the host is off. It takes effect at once and asks nothing. It is refused while the host has its lease, which
ends 15 s after its last sign of life.

If the machines do run on, there are more than were asked for until the host comes back and gives up its own. It counts as
alive again then, without another command. Machines that keep data are never replaced: they are back with their host.

Machines with names of the fleet (identity = named) start elsewhere, too: at once with on_isolation = keep, and otherwise 35 s
after the end of its lease, when the host would have ended them itself. With keep, be sure that the host is off: if it does
run them on, the same name is alive twice.

Example:
  spillway fleet host declare-dead host-a";

pub const REMOVE: &str = "\
Its records and shares are removed from etcd, and other hosts get machines in place of its own. If the catalog keeps data, these
begin empty: the data stays on the host that is removed. Stop the spillwayd there first, or start it without --fleet; a host
that is alive is refused.

Example:
  spillway fleet host remove host-a";

pub const CREATE: &str = "\
The options are those of 'spillway catalog create', and those of fleets. The count is that of all hosts together. Machines
are named CATALOG-HOST-###, such as desk-host-a-001, unless --naming says otherwise. What an option names (an image's
version, a bridge, a store) must be on each host that gets machines: one without it refuses its share, and is passed over.

A host that is lost or drained is replaced: others get as many machines more. Machines that keep data (dedicated ones,
--reset never, --data-disk) are on one host, and are never replaced.

Examples:
  spillway fleet catalog create desk --image debian:3 --count 200 --memory 2G
  Runners in two zones, on hosts with fast disks, whose hosts are lost after a minute:
    spillway fleet catalog create runner --image debian:3 --count 500 --warm 100 --zone east --zone west \\
        --host-label disk=nvme --lost-after 1m
  As few hosts as possible:
    spillway fleet catalog create night --image debian:3 --count 50 --spread pack
  From a file with several catalogs:
    spillway fleet catalog create desk -f fleet.toml";

pub const APPLY: &str = "\
The file is one of 'spillway catalog apply', with the settings of a fleet besides:
    [catalogs.desk]
    image = \"debian:3\"
    count = 200
    memory_bytes = \"2G\"
    zones = [\"east\", \"west\"]
    spread = \"even\"
    lost_after_seconds = 45
    min_ready = 150
    waves = [\"1\", \"10%\", \"50%\", \"100%\"]
    host_labels = { disk = \"nvme\" }
Settings that are missing have their defaults; catalogs that are not in the file do not change. Each catalog is changed as
a whole or not at all. The result of each is reported; if one fails, the others are still applied.

Examples:
  spillway fleet catalog apply -f fleet.toml
  spillway fleet catalog export desk | sed 's/count = 200/count = 300/' | spillway fleet catalog apply -f -
  spillway fleet catalog apply -f fleet.toml --dry-run";

pub const DIFF: &str = "\
Exit code: 0 if nothing would change, 1 if something would, others as in 'spillway --help'.

Examples:
  spillway fleet catalog diff -f fleet.toml
  spillway fleet catalog diff -f fleet.toml --json | jq -r '.items[] | select(.outcome != \"unchanged\").name'";

pub const EXPORT: &str = "\
Settings that the token may not read (user_data, for the role 'read') are left out and listed in 'redacted'. 'fleet catalog
apply' refuses such a file. To make catalogs of a host catalogs of the fleet, export them with 'spillway catalog export' and
apply the file with 'spillway fleet catalog apply', under other names.

Examples:
  spillway fleet catalog export > fleet.toml
  spillway fleet catalog export desk lab --format json";

pub const LIST: &str = "\
UNPLACED counts machines for which no host has space. HOSTS counts those that are to have machines.

Example:
  spillway fleet catalog list --label team=sales";

pub const SHOW: &str = "\
Below the settings is a line for each host: what it is to have (WANTED, VERSION), and what it has reported at most ten
seconds ago. Then hosts that refuse machines, with their reasons; then, where machines find no host, what each host lacks.

Examples:
  spillway fleet catalog show desk
  spillway fleet catalog show desk --json | jq .unplaced_because";

pub const SCALE: &str = "\
With fewer machines, those of draining hosts go first, then those of the hosts with most, unclaimed ones before claimed ones.

Example:
  spillway fleet catalog scale desk 300";

pub const UPDATE: &str = "\
All hosts bring the version first. Then they take it in waves (the setting waves), and each restarts its machines as --rollout
says. The next wave begins when the machines of the last one are ready, and min_ready machines stay so. If more machines than
--max-failed fail, or nothing progresses, the rollout halts: 'fleet catalog show' says why. Disks that keep their data stay on
their version. The image itself is changed with 'fleet catalog apply', in waves too.

Examples:
  spillway fleet catalog update desk --image debian:4
  Five at a time on each host:
    spillway fleet catalog update desk --image debian:4 --rollout batch=5
  spillway fleet catalog update desk --image debian:4 --dry-run";

pub const ROLLBACK: &str = "\
Hosts that have another version get it at once, without waves; others are not touched. min_ready machines stay ready.

Examples:
  spillway fleet catalog rollback desk
  spillway fleet catalog rollback desk --to 1";

pub const ROLLOUT: &str = "\
A rollout that is paused or has halted keeps its hosts as they are. New machines get the version that their host has.

Examples:
  spillway fleet catalog rollout pause desk
  spillway fleet catalog rollout resume desk
  spillway fleet catalog rollout abort desk";

pub const DELETE: &str = "\
Each host gives up its machines. Claimed ones stay until they are released. What machines kept stays in the stores of their
hosts ('spillway leftover list' there).

Example:
  spillway fleet catalog delete desk";

pub const CLAIM: &str = "\
The daemon that is asked asks one host after the other, those with ready machines first. The host that has the machine
decides, without etcd. Hosts without connection to etcd give no machines to the fleet.

The claim has an id ('request' with --json). If an answer is lost, the command repeats the request itself, for at most 90 s, or
with --wait for --timeout: it gets the same machine, whichever host is asked. In jobs that may be started twice, give the id with
--key: the daemon then asks all hosts whether they have a claim of it, before one is made. A host that is silent lets such a request
fail until the daemon gives it up (45 s after its lease has ended).

If the command fails or is interrupted, it undoes its claim. A claim that an earlier request with the --key has made stays, because another
run of the job may use it: the error names it, and says how to release it.

Exit codes:
  66  the fleet has no such catalog
  69  the fleet cannot be asked, or no host that may have a machine answers. If the error says that it is not known whether the request
      has claimed a machine, or that a claim may last: claim with the --key that it names
  73  no host has a free machine; with --wait: none was free until --timeout was over
  75  with --wait: the machine was not ready until --timeout was over; with --key: its claim has ended
  77  the token has not the role 'operate'
  130 interrupted (Ctrl-C)

Of two claims on one host, the later one has the larger 'fence' (host_epoch, then revision; see --json), unless records were restored from
a backup in between.

Examples:
  claim=$(spillway fleet claim runner --ttl 1h --wait)
  machine=$(echo \"$claim\" | cut -f1)          # host-b/runner-host-b-004
  spillway --host \"${machine%/*}\" machine exec \"${machine#*/}\" -- make test
  spillway fleet release \"$machine\" --claim \"$(echo \"$claim\" | cut -f3)\"
  A job that may be started twice gets one machine:
    spillway fleet claim runner --key \"job-$CI_JOB_ID\"";

pub const RENEW: &str = "\
Example:
  spillway fleet renew host-b/runner-host-b-004 --ttl 1h";

pub const RELEASE: &str = "\
Example:
  spillway fleet release host-b/runner-host-b-004 --claim 0b7ac1f2-3f4e-4f6a-8d55-0d5b2f0c9a11";

pub const EVENT: &str = "\
Times are those of the hosts' clocks. With --follow events of different hosts come as they arrive, those of one host in its order; a host that
cannot be asked is said once, and its events follow when it can.

Examples:
  spillway fleet event -n 20
  spillway fleet event --follow --json | jq -r 'select(.event.kind == \"failed\") | .host + \" \" + .event.text'";

pub const TOP: &str = "\
A row is a host, or with --per catalog a catalog on all hosts. Columns and keys are those of 'spillway top', which shows the machines of one
host ('spillway top --host HOST').

Examples:
  spillway fleet top
  spillway fleet top --per catalog --once";
