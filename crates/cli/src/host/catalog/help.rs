//! What `--help` shows below the options of `spillway catalog`. Owns text.

pub const CREATE: &str = "\
Examples:
  spillway catalog create desk --image debian --count 20 --ram 512M --overflow 15G
  Each somebody's own, with a disk for data, on the first version until it is told otherwise:
    spillway catalog create dev --image debian:1 --type dedicated --count 3 --data-disk 50G
  As a file says, which has more than one:
    spillway catalog create desk -f catalogs.toml";

pub const APPLY: &str = "\
A file has one table for each catalog, with the settings that 'catalog show' lists; sizes are numbers or words:
    [catalogs.desk]
    image = \"debian\"
    count = 20
    ram_bytes = \"512M\"
    labels = { team = \"sales\" }
What a setting is not said to be has its usual value; catalogs that are not in the file are left alone. A catalog is
changed whole or not at all; what becomes of each is reported, and if one fails the others go on.

Examples:
  spillway catalog apply -f catalogs.toml
  spillway catalog export desk | sed 's/count = 20/count = 30/' | spillway catalog apply -f -
  spillway catalog apply -f catalogs.json --dry-run";

pub const DIFF: &str = "\
Exit code: 0 nothing would change, 1 something would; others as in 'spillway --help'.

Examples:
  spillway catalog diff -f catalogs.toml
  spillway catalog diff -f catalogs.toml --json | jq -r '.items[] | select(.outcome != \"unchanged\").name'";

pub const EXPORT: &str = "\
What a token may not see (user_data, with the role 'read') is left out and named in 'redacted'; apply refuses that.

Examples:
  spillway catalog export > catalogs.toml
  spillway catalog export desk lab --format json";

pub const LIST: &str = "\
Example:
  spillway catalog list --label team=sales --label stage=test";

pub const SHOW: &str = "\
Example:
  spillway catalog show desk --json | jq .revision";

pub const SCALE: &str = "\
Example:
  spillway catalog scale desk 30";

pub const UPDATE: &str = "\
Without a version a catalog follows the image: what is published next is what its machines take next. Disks that keep
what is written stay on their version. An update that comes while another is rolled out replaces it.

Examples:
  Version 3, taken by each machine when it is started next:
    spillway catalog update desk --image debian:3
  What is published, five machines at a time; those that are claimed after two hours:
    spillway catalog update desk --image debian --rollout batch=5 --grace 7200
  The same, though up to two machines may fail, and told of after five minutes without progress:
    spillway catalog update desk --image debian --rollout batch=5 --max-failed 2 --deadline 300";

pub const ROLLBACK: &str = "\
Examples:
  The version before; again for the one before that:
    spillway catalog rollback desk
  spillway catalog rollback desk --to 1 --rollout now";

pub const ROLLOUT: &str = "\
'catalog show' says how far a rollout is and which machines are in its way. A rollout that makes no progress within its
deadline is stalled, which is an event; it goes on as soon as it can.

Examples:
  spillway catalog rollout pause desk
  spillway catalog rollout resume desk
  End it, and take all machines back to the version before, five at a time:
    spillway catalog rollout abort desk && spillway catalog rollback desk --rollout batch=5";

pub const DELETE: &str = "\
Example:
  spillway catalog delete desk";
