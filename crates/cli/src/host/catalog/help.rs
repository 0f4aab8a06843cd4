//! What `--help` shows below the options of `spillway catalog`. Owns text.

pub const CREATE: &str = "\
Examples:
  spillway catalog create desk --image debian --count 20 --ram 512M --overflow 15G
  Dedicated machines with a data disk, on version 1 of the image until the catalog is updated:
    spillway catalog create dev --image debian:1 --type dedicated --count 3 --data-disk 50G
  From a file with several catalogs:
    spillway catalog create desk -f catalogs.toml";

pub const APPLY: &str = "\
A file has one table for each catalog, with the settings that 'catalog show' lists. A size is a number of bytes or a text such as \"512M\":
    [catalogs.desk]
    image = \"debian\"
    count = 20
    ram_bytes = \"512M\"
    labels = { team = \"sales\" }
Settings that are missing have their defaults; catalogs that are not in the file do not change. Each catalog is changed as
a whole or not at all. The result of each is reported; if one fails, the others are still applied.

Examples:
  spillway catalog apply -f catalogs.toml
  spillway catalog export desk | sed 's/count = 20/count = 30/' | spillway catalog apply -f -
  spillway catalog apply -f catalogs.json --dry-run";

pub const DIFF: &str = "\
Exit code: 0 if nothing would change, 1 if something would, others as in 'spillway --help'.

Examples:
  spillway catalog diff -f catalogs.toml
  spillway catalog diff -f catalogs.toml --json | jq -r '.items[] | select(.outcome != \"unchanged\").name'";

pub const EXPORT: &str = "\
Settings that the token may not read (user_data, for the role 'read') are left out and listed in 'redacted'. 'catalog apply'
refuses such a file.

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
Without a version the catalog follows the image: its machines take the version that is published. Disks that keep their
data stay on their version. An update replaces a rollout that is under way.

Examples:
  Version 3, which each machine takes at its next start:
    spillway catalog update desk --image debian:3
  The published version, five machines at a time, claimed machines after two hours:
    spillway catalog update desk --image debian --rollout batch=5 --claim-grace 7200
  Five at a time; up to two machines may fail, and the rollout counts as stalled after five minutes without progress:
    spillway catalog update desk --image debian --rollout batch=5 --max-failed 2 --deadline 300";

pub const ROLLBACK: &str = "\
Examples:
  To the previous version of the catalog; once more for the one before that:
    spillway catalog rollback desk
  spillway catalog rollback desk --to 1 --rollout now";

pub const ROLLOUT: &str = "\
'catalog show' prints the progress of a rollout and the machines that block it. A rollout without progress within its
deadline is stalled and raises an event; it continues when the machines no longer block it.

Examples:
  spillway catalog rollout pause desk
  spillway catalog rollout resume desk
  End it, and take all machines back to the version before, five at a time:
    spillway catalog rollout abort desk && spillway catalog rollback desk --rollout batch=5";

pub const DELETE: &str = "\
Example:
  spillway catalog delete desk";
