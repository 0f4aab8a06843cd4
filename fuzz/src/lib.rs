//! What is fuzzed, as plain functions of a byte string: `fuzz_targets/` hands them libFuzzer's inputs, `bin/plain`
//! its own. Owns the bodies and their seeds; never decides how long they run.
//!
//! Invariant: a target panics only when the product did something that it must not do. Bytes that mean nothing
//! are as good as any.

mod chunks;
mod core_ops;
mod input;
mod memory;
mod meta;
mod nbd;
mod ntfs;
mod qcow2;
mod registry;
mod seeds;
mod streams;
mod trace;
mod vhost;
mod vmm;

/// What a power loss leaves of a file, of the model test.
#[path = "../../crates/core/tests/model/medium.rs"]
mod medium;
/// The model test of the core, with decisions taken from the input instead of a seed.
#[path = "../../crates/core/tests/model/oracle.rs"]
mod oracle;
mod rng;
#[allow(dead_code, reason = "the model test uses more of it")]
#[path = "../../crates/core/tests/model/run.rs"]
mod run;
#[allow(dead_code, reason = "as above")]
#[path = "../../crates/core/tests/model/sim.rs"]
mod sim;

/// A client's side of NBD that panics on what a server may not send.
#[allow(dead_code, reason = "the export's tests use more of it")]
#[path = "../../crates/export/tests/common/wire.rs"]
mod wire;

pub use chunks::{chunk_frame, registry_index};
pub use core_ops::core_ops;
pub use meta::meta_attach;
pub use nbd::{nbd_handshake, nbd_transmission};
pub use ntfs::{ntfs_volume, registry_hive};
pub use qcow2::qcow2_image;
pub use registry::registry_manifest;
pub use seeds::seeds;
pub use streams::stream_packets;
pub use trace::trace_file;
pub use vhost::{vhost_messages, virtqueue};

/// A target: its name and its body.
pub type Target = (&'static str, fn(&[u8]));

/// All of them.
pub const TARGETS: [Target; 14] = [
    ("vhost_messages", vhost_messages),
    ("virtqueue", virtqueue),
    ("nbd_handshake", nbd_handshake),
    ("nbd_transmission", nbd_transmission),
    ("meta_attach", meta_attach),
    ("qcow2_image", qcow2_image),
    ("core_ops", core_ops),
    ("trace_file", trace_file),
    ("registry_manifest", registry_manifest),
    ("registry_index", registry_index),
    ("chunk_frame", chunk_frame),
    ("stream_packets", stream_packets),
    ("ntfs_volume", ntfs_volume),
    ("registry_hive", registry_hive),
];
