//! Drivers of the hypervisors. Owns how they are called; knows nothing of when.

pub mod bridge;
pub mod domain;
pub mod libvirt;
pub mod qemu;
pub mod qmp;
pub mod uefi;
