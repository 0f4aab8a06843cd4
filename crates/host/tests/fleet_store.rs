//! The client of etcd with real clusters: what follows the records misses nothing, the lease is valid no longer than etcd has it, and a
//! member that does not answer is left.
#![allow(clippy::unwrap_used)]

#[path = "fleet_store/disturbances.rs"]
mod disturbances;
#[path = "fleet_store/failures.rs"]
mod failures;
#[path = "fleet_store/leases.rs"]
mod leases;
#[path = "fleet_store/records.rs"]
mod records;
#[path = "fleet_store/scene.rs"]
mod scene;
#[path = "fleet_store/strangers.rs"]
mod strangers;
