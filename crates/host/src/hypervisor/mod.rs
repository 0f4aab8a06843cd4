//! Who runs machines. Owns how they are spoken to; knows nothing of when.

pub mod bridge;
pub mod domain;
pub mod libvirt;
pub mod qemu;
pub mod qmp;
