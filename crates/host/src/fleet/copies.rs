//! Images on this host as its fleet wants them: the hosts that exchange chunks, boot sets that hosts share, and full copies.
//!
//! Owns the task for that; the decisions are in the crate `fleet`. Invariant: without etcd, and while this host is not of the fleet whose records
//! it sees, everything stays as it is.

use super::door::FleetDoor;
use super::etcd::now;
use super::service::FleetService;
use super::shares::ShareReconciler;
use crate::error::HostError;
use crate::streaming::{Streaming, url_of_member};
use crate::work::blocking;
use spillway_api::{ErrorCode, EventKind, Name, Residency};
use spillway_fleet::agent::ImageSource;
use spillway_fleet::boot::{self, BootRecord};
use spillway_fleet::copies::CopyHolders;
use spillway_fleet::keys::ImageDigest;
use spillway_fleet::liveness::StoreHealth;
use spillway_fleet::peers::group;
use spillway_fleet::records::VersionName;
use spillway_fleet::transaction::Transaction;
use spillway_fleet::view::FleetView;
use spillway_registry::serve::PeerMember;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

/// Shortest interval of looks: reports of all hosts change the records all the time.
const PAUSE: Duration = Duration::from_secs(1);
/// Longest interval of looks.
const TICK: Duration = Duration::from_secs(5);

/// What the records want of the images on this host.
#[derive(Default)]
struct WantedImages {
    /// Versions of which the host is to have all.
    copies: BTreeMap<(Name, u32), ImageSource>,
    /// Boot sets of images that the host has, or is to have.
    sets: Vec<(String, Name, Vec<u32>)>,
    /// Digests of the fleet's images.
    digests: BTreeSet<ImageDigest>,
}

/// Looks after the images for as long as the daemon runs.
pub(super) async fn look_after_images(service: FleetService, streaming: Streaming) {
    let (mut view, health) = (service.subscribe(), service.store().health());
    let mut holders = CopyHolders::default();
    let mut told = BTreeMap::new();
    loop {
        let health = StoreHealth { trouble: health.borrow().trouble };
        let images = {
            let view = view.borrow_and_update();
            holders.observe(&view, &health, now());
            wanted_images(&service, &view, &holders)
        };
        if let Some(images) = images {
            streaming.set_members(members(service.door()));
            let changes = carry_out(&service, &streaming, images, &mut told).await;
            for change in changes {
                // The records tell, and the next look decides anew.
                let _ = service.store().commit(&change).await;
            }
        }
        tokio::time::sleep(PAUSE).await;
        tokio::select! {
            _ = view.changed() => {}
            () = tokio::time::sleep(TICK) => {}
        }
    }
}

/// The hosts that exchange chunks with this one.
fn members(door: &FleetDoor) -> Vec<PeerMember> {
    let all = door.members.peers();
    let exchange = || all.iter().filter(|(_, peers)| peers.is_some()).map(|(name, _)| name);
    let of_group = group(exchange(), &door.host).into_iter();
    let member = |name: &Name| {
        let (address, certificate) = all.get(name)?.as_ref()?;
        Some(PeerMember { address: url_of_member(address), certificate: certificate.to_string() })
    };
    of_group.filter_map(member).collect()
}

fn wanted_images(service: &FleetService, view: &FleetView, holders: &CopyHolders) -> Option<WantedImages> {
    let shares = service.wanted(view)?;
    let copies = holders.wanted(view, &service.door().host, now());
    let mut here = shares.images();
    here.extend(copies.values().filter_map(|source| ImageDigest::of(&source.image.digest)));
    let sets = view.boots.iter().filter(|((digest, _), _)| here.contains(digest));
    let sets =
        sets.map(|((digest, catalog), set)| (digest.with_kind(), catalog.clone(), set.value.chunks.clone()));
    let digests = view.images.values().filter_map(|image| ImageDigest::of(&image.value.digest));
    Some(WantedImages { sets: sets.collect(), digests: digests.collect(), copies })
}

/// Carries out what is wanted, and returns what others are to know of boots on this host. `told` has the versions whose copies are refused, with
/// the reasons that an event has told.
async fn carry_out(
    service: &FleetService,
    streaming: &Streaming,
    images: WantedImages,
    told: &mut BTreeMap<(Name, u32), String>,
) -> Vec<Transaction> {
    let (reconciler, streaming) = (service.reconciler().clone(), streaming.clone());
    let done = blocking(move || -> Result<_, HostError> {
        take_sets(&streaming, &images.sets)?;
        let refused = keep_copies(&reconciler, &images.copies)?;
        Ok((refused, recorded_sets(&streaming, &images.digests)?))
    });
    let (refused, recorded) = match done.await {
        Ok(Ok(done)) => done,
        Ok(Err(e)) => {
            let text = format!("images of the fleet: {}", e.message);
            if told.insert((service.door().host.clone(), 0), text.clone()).as_ref() != Some(&text) {
                service.events().raise(EventKind::Failed, "host", text);
            }
            return Vec::new();
        }
        Err(_) => return Vec::new(),
    };
    let reasons: BTreeMap<(Name, u32), String> = refused.into_iter().map(|(of, e)| (of, e.message)).collect();
    for ((name, version), why) in reasons.iter().filter(|(of, why)| told.get(*of) != Some(why)) {
        let text = format!("this host does not have all of the fleet's image {name}:{version}: {why}");
        service.events().raise(EventKind::Failed, &format!("image/{name}:{version}"), text);
    }
    *told = reasons;
    let view = service.view();
    // The records may be others by now.
    if !service.takes_part(&view) {
        return Vec::new();
    }
    let publish =
        |(digest, catalog, set): &(ImageDigest, Name, BootRecord)| boot::publish(&view, digest, catalog, set);
    recorded.iter().filter_map(publish).collect()
}

/// Takes the boot sets of other hosts.
fn take_sets(streaming: &Streaming, sets: &[(String, Name, Vec<u32>)]) -> Result<(), HostError> {
    let mut is_new = false;
    for (digest, catalog, chunks) in sets {
        is_new |= streaming.boot_sets().take_shared(digest, catalog, chunks)?;
    }
    if is_new {
        streaming.changed();
    }
    Ok(())
}

/// Brings versions of which this host is to have all. Returns which it has not, and why, unless they are on their way.
fn keep_copies(
    reconciler: &ShareReconciler,
    copies: &BTreeMap<(Name, u32), ImageSource>,
) -> Result<BTreeMap<(Name, u32), HostError>, HostError> {
    let (mut there, mut refused) = (Vec::new(), BTreeMap::new());
    for ((name, version), source) in copies {
        let of = VersionName { image: name.clone(), version: *version };
        match reconciler.bring(&of, Some(source), Some(Residency::Boot)) {
            Ok(()) => there.push((name.clone(), *version)),
            Err(e) if e.code == ErrorCode::Conflict => {}
            Err(e) => drop(refused.insert((name.clone(), *version), e)),
        }
    }
    refused.extend(reconciler.images.keep_whole(&there)?);
    Ok(refused)
}

/// The boot sets of this host that come from boots here.
fn recorded_sets(
    streaming: &Streaming,
    digests: &BTreeSet<ImageDigest>,
) -> Result<Vec<(ImageDigest, Name, BootRecord)>, HostError> {
    let mut recorded = Vec::new();
    for digest in digests {
        for set in streaming.boot_sets().by_catalog(&digest.with_kind())? {
            let (Ok(catalog), Ok(boots)) = (set.catalog.parse(), u32::try_from(set.boots)) else { continue };
            if boots >= boot::FIRST_BOOTS {
                recorded.push((digest.clone(), catalog, BootRecord { boots, chunks: set.chunks }));
            }
        }
    }
    Ok(recorded)
}

#[cfg(test)]
mod tests {
    use spillway_fleet::boot;
    use spillway_registry::MOST_BOOT_CHUNKS;

    #[test]
    fn sets_of_a_fleet_are_as_long_as_those_of_registries() {
        assert_eq!(boot::MOST_CHUNKS, MOST_BOOT_CHUNKS);
    }
}
