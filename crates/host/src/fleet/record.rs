//! The record of this host of the fleet that it is in. Owns the identity of the host.
//!
//! Invariant: a host is in one fleet, and keeps its identity as long as its records.

use crate::error::HostError;
use crate::machines::desired_state::boot_id;
use crate::state_folder::DATABASE;
use crate::store::{Objects, RecordKind, StoredRecord};
use serde::{Deserialize, Serialize};
use spillway_api::{Catalog, ErrorCode, Name};
use std::fmt;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use utoipa::ToSchema;

const KEY: &str = "membership";

/// The fleet that a host is in.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct FleetMembership {
    /// Name of the fleet.
    pub fleet: Name,
    /// Name of the host in the fleet.
    pub host: Name,
    /// Identity of the host.
    pub host_id: String,
    /// Identity of the fleet; none before the host has joined it.
    pub fleet_id: Option<String>,
    /// Highest epoch in which the host was to run machines with names of the fleet. It runs none in an earlier one.
    #[serde(default)]
    pub highest_epoch: i64,
    /// Boot of the host in which it was last known that no other host runs machines with these records.
    #[serde(default)]
    pub boot: Option<String>,
    /// Highest revision of the records that the host has acted on.
    #[serde(default)]
    pub highest_revision: i64,
    /// Set once etcd has had older records than the host has acted on: the host does nothing for the fleet until somebody has accepted them
    /// with 'spillwayd accept-restored-fleet'.
    #[serde(default)]
    pub restored: Option<RestoredRecords>,
}

/// Records of etcd that are older than those that a host has seen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct RestoredRecords {
    /// Revision of the records that etcd had then.
    pub found_revision: i64,
    /// Highest revision that the host had seen.
    pub seen_revision: i64,
}

impl fmt::Display for RestoredRecords {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "etcd has older records than this host has seen (revision {}, and it had {}): it was restored from a backup. When the catalogs of the \
             fleet are as they should be, stop spillwayd, run 'spillwayd accept-restored-fleet', and start it",
            self.found_revision, self.seen_revision
        )
    }
}

impl StoredRecord for FleetMembership {
    const PREFIX: &'static str = "fleet/";
    const WORD: &'static str = "membership in a fleet";
}

/// Kinds of records of this module.
pub(crate) const RECORDS: [RecordKind; 1] = [RecordKind::of::<FleetMembership>()];

/// The present boot of the host, and the file that has its records. Records that were copied are in another file, also if the copy is on the
/// same host, or in a container with the same kernel.
///
/// # Errors
/// There is no such file.
pub fn boot_of_records(state: &Path) -> std::io::Result<String> {
    let file = std::fs::metadata(state.join(DATABASE))?;
    Ok(format!("{}:{:x}:{:x}", boot_id(), file.dev(), file.ino()))
}

impl FleetMembership {
    /// Opens the record of a host with this name in this fleet, or makes it.
    ///
    /// # Errors
    /// The host is in another fleet, or has another name in it, and has catalogs of it.
    pub fn open(
        objects: &Objects,
        fleet: &Name,
        host: &Name,
        boot: &str,
    ) -> Result<FleetMembership, HostError> {
        objects.change(|changes| {
            let found = changes.get::<FleetMembership>(KEY)?.map(|found| found.value);
            let of_fleet = |fleet: &Name| -> Result<Vec<String>, HostError> { catalogs_of(objects, fleet) };
            match found {
                Some(found) if found.fleet == *fleet && found.host == *host => return Ok(found),
                Some(found) => {
                    let catalogs = of_fleet(&found.fleet)?;
                    if !catalogs.is_empty() {
                        let message = format!(
                            "this host is {} in the fleet {}, and has catalogs of it ({}): drain it there first ('spillway fleet host drain \
                             {}'), or end its membership with 'spillwayd leave-fleet', which makes them its own",
                            found.host,
                            found.fleet,
                            catalogs.join(", "),
                            found.host
                        );
                        return Err(HostError::new(ErrorCode::InUse, message));
                    }
                }
                None => {}
            }
            let made = FleetMembership {
                fleet: fleet.clone(),
                host: host.clone(),
                host_id: uuid::Uuid::new_v4().to_string(),
                fleet_id: None,
                highest_epoch: 0,
                boot: Some(boot.to_owned()),
                highest_revision: 0,
                restored: None,
            };
            changes.put(KEY, &made);
            Ok(made)
        })
    }

    /// Records that the host has an epoch, in which it may run machines with names of the fleet.
    pub fn enter(objects: &Objects, epoch: i64) -> Result<(), HostError> {
        objects.change(|changes| {
            if let Some(found) = changes.get::<FleetMembership>(KEY)?.map(|found| found.value) {
                let highest_epoch = found.highest_epoch.max(epoch);
                // An epoch is a revision.
                let highest_revision = found.highest_revision.max(epoch);
                changes.put(KEY, &FleetMembership { highest_epoch, highest_revision, ..found });
            }
            Ok(())
        })
    }

    /// Records the present boot of the host: no other host runs machines with these records any more.
    pub fn settle(objects: &Objects, boot: &str) -> Result<(), HostError> {
        objects.change(|changes| {
            if let Some(found) = changes.get::<FleetMembership>(KEY)?.map(|found| found.value) {
                changes.put(KEY, &FleetMembership { boot: Some(boot.to_owned()), ..found });
            }
            Ok(())
        })
    }

    /// Whether the records of the host are of another boot ([`boot_of_records`]): it has booted since, or they were copied.
    pub fn is_of_other_boot(&self, boot: &str) -> bool {
        self.boot.as_deref() != Some(boot)
    }

    /// Records that the host is about to act on records of this revision.
    pub fn act_on(objects: &Objects, revision: i64) -> Result<(), HostError> {
        objects.change(|changes| {
            let found = changes.get::<FleetMembership>(KEY)?.map(|found| found.value);
            if let Some(found) = found.filter(|found| found.highest_revision < revision) {
                changes.put(KEY, &FleetMembership { highest_revision: revision, ..found });
            }
            Ok(())
        })
    }

    /// Records that etcd has older records than the host has seen.
    pub fn hold(objects: &Objects, restored: RestoredRecords) -> Result<(), HostError> {
        objects.change(|changes| {
            let found = changes.get::<FleetMembership>(KEY)?.map(|found| found.value);
            if let Some(found) = found.filter(|found| found.restored.is_none()) {
                changes.put(KEY, &FleetMembership { restored: Some(restored), ..found });
            }
            Ok(())
        })
    }

    /// Accepts what was found: the host begins with these records as if it had seen no others. `None`: there is nothing to accept.
    ///
    /// # Errors
    /// The records of the host cannot be read or written.
    pub fn accept(objects: &Objects) -> Result<Option<RestoredRecords>, HostError> {
        objects.change(|changes| {
            let found = changes.get::<FleetMembership>(KEY)?.map(|found| found.value);
            let Some((restored, found)) = found.and_then(|found| Some((found.restored?, found))) else {
                return Ok(None);
            };
            // Epochs are counted by etcd, and begin with its revision, too.
            let accepted = FleetMembership { highest_epoch: 0, highest_revision: 0, restored: None, ..found };
            changes.put(KEY, &accepted);
            Ok(Some(restored))
        })
    }

    /// Records that the host has joined the fleet with this identity.
    pub fn join(objects: &Objects, fleet_id: &str) -> Result<(), HostError> {
        objects.change(|changes| {
            if let Some(found) = changes.get::<FleetMembership>(KEY)?.map(|found| found.value) {
                changes.put(KEY, &FleetMembership { fleet_id: Some(fleet_id.to_owned()), ..found });
            }
            Ok(())
        })
    }
}

/// What a host has left.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LeftFleet {
    /// The fleet.
    pub fleet: Name,
    /// Catalogs that belong to the host from now on.
    pub catalogs: Vec<String>,
}

/// Ends the membership of a host whose daemon does not run. Catalogs of the fleet become the host's own, unless their machines have names of
/// the fleet. `None`: it is in no fleet.
///
/// # Errors
/// The records cannot be read or written.
pub fn leave(objects: &Objects) -> Result<Option<LeftFleet>, HostError> {
    objects.change(|changes| {
        let Some(found) = changes.get::<FleetMembership>(KEY)? else { return Ok(None) };
        let fleet = found.value.fleet;
        let mut catalogs = Vec::new();
        for catalog in changes.list_readable_below::<Catalog>("")? {
            // Machines with names of the fleet never run without it: what is left of them is to be deleted.
            if catalog.value.fleet.as_ref().is_some_and(|owner| owner.fleet == fleet && owner.named.is_none())
            {
                changes.put(&catalog.name, &Catalog { fleet: None, ..catalog.value });
                catalogs.push(catalog.name);
            }
        }
        changes.delete::<FleetMembership>(KEY);
        Ok(Some(LeftFleet { fleet, catalogs }))
    })
}

fn catalogs_of(objects: &Objects, fleet: &Name) -> Result<Vec<String>, HostError> {
    let catalogs = objects.list::<Catalog>()?;
    let is_of = |catalog: &Catalog| catalog.fleet.as_ref().is_some_and(|of| of.fleet == *fleet);
    Ok(catalogs.into_iter().filter(|catalog| is_of(&catalog.value)).map(|catalog| catalog.name).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::machines::testing::{TestHost, spec};
    use crate::resources::budget::NO_LIMITS;
    use serde_json::json;
    use spillway_api::FleetOwner;

    #[test]
    fn older_records_hold_the_host_until_they_are_accepted() {
        let host = TestHost::new(NO_LIMITS);
        let open = || {
            FleetMembership::open(&host.objects, &"site".parse().unwrap(), &"a".parse().unwrap(), "boot")
                .unwrap()
        };
        open();
        FleetMembership::act_on(&host.objects, 9).unwrap();
        FleetMembership::act_on(&host.objects, 7).unwrap();
        FleetMembership::enter(&host.objects, 8).unwrap();
        assert_eq!((open().highest_epoch, open().highest_revision), (8, 9));
        assert_eq!(FleetMembership::accept(&host.objects).unwrap(), None);
        let restored = RestoredRecords { found_revision: 5, seen_revision: 9 };
        FleetMembership::hold(&host.objects, restored).unwrap();
        FleetMembership::hold(&host.objects, RestoredRecords { found_revision: 6, ..restored }).unwrap();
        assert_eq!(open().restored, Some(restored), "the first one tells more");
        assert_eq!(FleetMembership::accept(&host.objects).unwrap(), Some(restored));
        let accepted = open();
        assert_eq!((accepted.highest_epoch, accepted.highest_revision, accepted.restored), (0, 0, None));
    }

    #[test]
    fn a_copy_of_the_records_is_of_another_boot() {
        let dir = tempfile::tempdir().unwrap();
        let [one, copy] = ["one", "copy"].map(|folder| dir.path().join(folder));
        for folder in [&one, &copy] {
            std::fs::create_dir(folder).unwrap();
        }
        std::fs::write(one.join(DATABASE), "records").unwrap();
        let before = boot_of_records(&one).unwrap();
        std::fs::write(one.join(DATABASE), "more records").unwrap();
        std::fs::copy(one.join(DATABASE), copy.join(DATABASE)).unwrap();
        assert_eq!(boot_of_records(&one).unwrap(), before);
        assert_ne!(boot_of_records(&copy).unwrap(), before);
    }

    #[test]
    fn a_host_keeps_its_identity_and_leaves_a_fleet_without_its_catalogs() {
        let host = TestHost::new(NO_LIMITS);
        let name = |text: &str| text.parse::<Name>().unwrap();
        let first = FleetMembership::open(&host.objects, &name("site"), &name("a"), "boot").unwrap();
        assert_eq!(first.fleet_id, None);
        assert!(!first.is_of_other_boot("boot") && first.is_of_other_boot("boot of a copy"));
        FleetMembership::join(&host.objects, "f").unwrap();
        let again = FleetMembership::open(&host.objects, &name("site"), &name("a"), "boot").unwrap();
        assert_eq!(again, FleetMembership { fleet_id: Some("f".into()), ..first.clone() });
        let owner = FleetOwner { fleet: name("site"), generation: 1, named: None };
        host.catalogs.create_for_fleet(&name("desk"), &spec(json!({})), owner).unwrap();
        for (fleet, called) in [("other", "a"), ("site", "b")] {
            let refused =
                FleetMembership::open(&host.objects, &name(fleet), &name(called), "boot").unwrap_err();
            assert!(refused.message.contains("has catalogs of it (desk)"), "{refused}");
        }
        let terms = crate::catalogs::CatalogChangeTerms::default();
        host.catalogs.delete(&name("desk"), terms).unwrap();
        let other = FleetMembership::open(&host.objects, &name("other"), &name("a"), "boot").unwrap();
        assert!(other.fleet_id.is_none() && other.host_id != first.host_id);
        let owner = FleetOwner { fleet: name("other"), generation: 1, named: None };
        host.catalogs.create_for_fleet(&name("desk"), &spec(json!({})), owner).unwrap();
        let left = leave(&host.objects).unwrap().unwrap();
        assert_eq!((left.fleet.as_str(), left.catalogs), ("other", vec!["desk".to_owned()]));
        assert_eq!(host.catalogs.get(&name("desk")).unwrap().fleet, None);
        assert_eq!(leave(&host.objects).unwrap(), None);
    }
}
