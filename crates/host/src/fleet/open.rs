//! Opens the fleet of the host: its certificate, its listener, its record and its store. Decides nothing.

use super::boot_set_waits::BootSetWaits;
use super::door::{FleetDoor, FleetListener, Identity};
use super::etcd::{FleetStore, FleetStoreSettings};
use super::named::NameKeeper;
use super::options::FleetHostSettings;
use super::pulls::FleetPulls;
use super::record::{FleetMembership, boot_of_records};
use super::report::ReportCut;
use super::service::{FleetParts, FleetService};
use super::shares::ShareReconciler;
use super::token::EtcdAccess;
use crate::catalogs::Catalogs;
use crate::error::HostError;
use crate::events::Events;
use crate::images::Images;
use crate::machines::{MachineShares, NameGate};
use crate::registries::Registries;
use crate::resources::budget::Capacity;
use crate::scopes::Scopes;
use crate::store::Objects;
use crate::streaming::Streaming;
use anyhow::{Context, Result};
use spillway_api::Hypervisor;
use spillway_fleet::membership::{HostMembership, OwnHost};
use spillway_fleet::records::AliveRecord;
use std::path::Path;
use std::sync::Arc;

/// What is open before the machines are known.
pub struct OpenFleet {
    settings: FleetHostSettings,
    /// Connections to other hosts.
    pub door: Arc<FleetDoor>,
    /// Listener for other hosts. Nobody is let in before the members are known.
    pub listener: Arc<FleetListener>,
    certificate: String,
    /// Boot of the host, and the file of its records.
    boot: String,
}

/// Parts of the host that a fleet acts on.
pub struct HostParts {
    /// Records of the host.
    pub objects: Objects,
    /// Events of the host.
    pub events: Events,
    /// Catalogs of the host.
    pub catalogs: Catalogs,
    /// Images of the host.
    pub images: Images,
    /// Registries of the host.
    pub registries: Registries,
    /// What brings chunks of streamed images.
    pub streaming: Streaming,
    /// Machines of the fleet's catalogs on the host.
    pub machines: MachineShares,
    /// Budget of the host.
    pub capacity: Capacity,
    /// What runs machines on the host.
    pub hypervisor: Hypervisor,
    /// What the fleet lets machines with its names do.
    pub names: Arc<NameGate>,
    /// Control groups of processes.
    pub scopes: Scopes,
}

impl OpenFleet {
    /// Opens the listener, with a certificate in the state folder, which is made if there is none.
    ///
    /// # Errors
    /// The certificate cannot be made or read, or the address is not free.
    pub async fn open(settings: FleetHostSettings, state: &Path) -> Result<OpenFleet> {
        let identity = Identity::open(state, &settings.host)?;
        let door = FleetDoor::new(settings.host.clone(), &identity);
        let listener = FleetListener::open(settings.listen, &identity, door.members.clone()).await?;
        let certificate = identity.digest().to_string();
        let boot = boot_of_records(state).context("the records of this host")?;
        Ok(OpenFleet { settings, door: Arc::new(door), listener: Arc::new(listener), certificate, boot })
    }

    /// Begins to take part in the fleet.
    ///
    /// # Errors
    /// The host is in another fleet.
    pub fn begin(self, parts: HostParts) -> Result<FleetService, HostError> {
        let FleetHostSettings { etcd, host, zone, labels, told, peers, .. } = self.settings;
        let record = FleetMembership::open(&parts.objects, &etcd.address.fleet, &host, &self.boot)?;
        let is_other_boot = record.is_of_other_boot(&self.boot);
        let alive = AliveRecord {
            instance: self.door.instance.clone(),
            boot_id: self.boot.clone(),
            address: told,
            certificate: self.certificate,
            version: env!("CARGO_PKG_VERSION").into(),
            hypervisor: parts.hypervisor,
            peers: peers.map(|peers| peers.told),
            lease: 0,
        };
        let own = OwnHost { name: host, host_id: record.host_id.clone(), zone, labels, alive };
        let reconciler = ShareReconciler {
            fleet: etcd.address.fleet.clone(),
            catalogs: parts.catalogs,
            machines: parts.machines,
            images: parts.images,
            registries: parts.registries,
            pulls: FleetPulls::default(),
            boot_sets: BootSetWaits::default(),
            capacity: parts.capacity,
            hypervisor: parts.hypervisor,
            events: parts.events.clone(),
            cut: ReportCut::default(),
        };
        // The key of this host keeps its epoch, whatever lease it has.
        let EtcdAccess { address, tls, user } = etcd.clone();
        let store = FleetStore::open(FleetStoreSettings { address, tls, user });
        let named = NameKeeper {
            host: own.name.clone(),
            instance: own.alive.instance.clone(),
            gate: parts.names,
            scopes: parts.scopes,
            objects: parts.objects.clone(),
            events: parts.events.clone(),
            highest_epoch: record.highest_epoch,
            boot: self.boot,
            is_other_boot,
        };
        let service = FleetService::begin(FleetParts {
            etcd,
            store,
            door: self.door,
            events: parts.events,
            objects: parts.objects,
            reconciler,
            streaming: parts.streaming,
            membership: HostMembership::new(own, record.fleet_id.clone()),
            record,
        });
        tokio::spawn(named.keep(service.clone()));
        Ok(service)
    }
}
