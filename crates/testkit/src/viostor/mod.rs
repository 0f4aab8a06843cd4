//! Windows without Windows: its virtio-blk driver `viostor`, as far as a disk can tell it from the real one, and the part of
//! Windows above it that repeats requests.
//!
//! Written after the driver's sources (virtio-win/kvm-guest-drivers-windows, folders `viostor` and `VirtIO`, July 2026) and
//! those of Windows' class driver (microsoft/Windows-driver-samples, `classpnp`): feature bits, fields of the configuration,
//! memory layout, limits, resets. The connection is not that of [`crate::driver`]: the crate `virtio-driver` makes no
//! indirect tables and cannot stop a queue.
//!
//! | file | what it is |
//! | --- | --- |
//! | `session` | the VMM: what QEMU sends when a driver starts its device, or resets it |
//! | `memory` | the guest's memory, in two regions |
//! | `ring` | a split virtqueue as `VirtIORing.c` keeps it |
//! | `layout` | where a request's parts lie, and how it is cut into segments |
//! | `adapter` | `viostor`: from commands to requests, and what a reset does |
//! | `windows` | the class driver and its users: commands at random, time-outs, repetitions, an oracle for each byte |

mod adapter;
mod layout;
mod memory;
mod ring;
mod session;
mod windows;

pub use adapter::{Adapter, Command, Limits, Mode};
pub use windows::{Counts, Windows};
