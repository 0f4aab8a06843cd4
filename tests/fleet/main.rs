//! Fleets of real hosts: three members of etcd, daemons in network namespaces, guests in software.
#![allow(clippy::unwrap_used)]

mod alone;
mod bad_input;
mod browser;
mod failure;
mod named;
mod network;
mod partitions;
mod restored;
#[path = "../../crates/fleet/tests/common/rng.rs"]
mod rng;
mod rollouts;
mod world;
