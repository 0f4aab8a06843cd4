//! Fleets of real hosts: three members of etcd, daemons in network namespaces, guests in software.
#![allow(clippy::unwrap_used)]

mod browser;
mod failure;
mod named;
mod network;
mod restored;
mod rollouts;
mod world;
