//! The device as the guest sees it: features and configuration space (virtio 5.2.3, 5.2.4). Never knows
//! of queues or memory.
//!
//! Invariant: what is offered here is what `request.rs` and `queue.rs` carry out.

use super::message::{F_PROTOCOL_FEATURES, protocol};

/// Feature bits, by the names of the virtio specification.
pub(super) mod feature {
    pub(in super::super) const SEG_MAX: u64 = 1 << 2;
    pub(in super::super) const BLK_SIZE: u64 = 1 << 6;
    pub(in super::super) const FLUSH: u64 = 1 << 9;
    pub(in super::super) const TOPOLOGY: u64 = 1 << 10;
    pub(in super::super) const CONFIG_WCE: u64 = 1 << 11;
    pub(in super::super) const MQ: u64 = 1 << 12;
    pub(in super::super) const DISCARD: u64 = 1 << 13;
    pub(in super::super) const WRITE_ZEROES: u64 = 1 << 14;
    pub(in super::super) const RING_INDIRECT_DESC: u64 = 1 << 28;
    pub(in super::super) const RING_EVENT_IDX: u64 = 1 << 29;
    pub(in super::super) const VERSION_1: u64 = 1 << 32;
}

/// Virtio features on offer. `VHOST_F_LOG_ALL` is not among them: without it a VMM refuses live migration. `SIZE_MAX` is
/// not either: there is no limit to announce, and FreeBSD refuses a disk whose limit is below 1 MiB.
pub(super) const FEATURES: u64 = feature::SEG_MAX
    | feature::BLK_SIZE
    | feature::FLUSH
    | feature::TOPOLOGY
    | feature::CONFIG_WCE
    | feature::MQ
    | feature::DISCARD
    | feature::WRITE_ZEROES
    | feature::RING_INDIRECT_DESC
    | feature::RING_EVENT_IDX
    | feature::VERSION_1
    | F_PROTOCOL_FEATURES;

/// Protocol features on offer.
pub(super) const PROTOCOL_FEATURES: u64 = protocol::MQ
    | protocol::REPLY_ACK
    | protocol::CONFIG
    | protocol::INFLIGHT_SHMFD
    | protocol::RESET_DEVICE
    | protocol::CONFIGURE_MEM_SLOTS;

/// Data segments that a driver may put into a request: with header and status they fit a queue of 128 descriptors, the
/// smallest that a VMM makes by default. More of them are served as well.
const SEG_MAX: u32 = 126;
/// Most data in one request, in whole sectors: a chain has at most 2^32 bytes (virtio 2.7.5.2). No smaller limit may be
/// enforced, as a driver that has not negotiated `SIZE_MAX` and `SEG_MAX` knows of none.
pub(super) const MAX_DATA_BYTES: u64 = (1 << 32) - spillway_core::SECTOR_BYTES;
/// Most sectors in one discard or write-zeroes: 4 GiB less a sector.
pub(super) const MAX_RANGE_SECTORS: u32 = (1 << 23) - 1;
/// Sectors of a block, the unit in which a discard frees space.
const BLOCK_SECTORS: u32 = 8;
/// What drivers are told of [`MAX_RANGE_SECTORS`]: whole blocks. Windows cuts a longer discard at exactly this many sectors,
/// whatever the alignment is: from the first cut on no piece would begin with a block, and the block of each cut would stay.
const OFFERED_RANGE_SECTORS: u32 = MAX_RANGE_SECTORS / BLOCK_SECTORS * BLOCK_SECTORS;
/// Bytes of `struct virtio_blk_config` up to and with write zeroes.
const CONFIG_BYTES: usize = 60;
/// Offset of `writeback` in it, the one byte that a driver may write.
pub(super) const WRITEBACK_AT: usize = 32;
/// Bytes of a serial number (GET_ID).
pub(super) const SERIAL_BYTES: usize = 20;

/// The disk as an export sees it.
#[derive(Clone, Debug)]
pub struct DeviceConfig {
    /// Size of the disk, a multiple of 512.
    pub size_bytes: u64,
    /// Request queues on offer, 1 to 64.
    pub queues: u16,
    /// What GET_ID answers; the first 20 bytes count.
    pub serial: String,
    /// Whether the disk starts as a write-back one (`writeback` of the configuration space, 5.2.4). A guest
    /// may change it; [`super::Frontend::writeback`] has the current value, for the next session.
    pub writeback: bool,
}

/// The configuration and the driver's choices, in the form in which requests need them.
pub(super) struct Device {
    pub capacity_sectors: u64,
    pub queues: u16,
    pub serial: [u8; SERIAL_BYTES],
    /// The setting behind `writeback` of the configuration space; it outlives a driver.
    pub writeback: bool,
    /// Writes are stable before they complete (5.2.6.2): set whenever features or `writeback` change.
    pub write_through: bool,
    /// This driver sees `writeback` and cannot flush: it reads 0 (5.2.5.2).
    cannot_flush: bool,
}

impl Device {
    pub(super) fn new(config: &DeviceConfig) -> Device {
        let mut serial = [0; SERIAL_BYTES];
        let len = config.serial.len().min(SERIAL_BYTES);
        serial[..len].copy_from_slice(&config.serial.as_bytes()[..len]);
        Device {
            capacity_sectors: config.size_bytes / spillway_core::SECTOR_BYTES,
            queues: config.queues,
            serial,
            writeback: config.writeback,
            // As if no feature had been chosen.
            write_through: true,
            cannot_flush: false,
        }
    }

    /// 5.2.5, 5.2.6.2: a driver that cannot flush, or that asked for it, has a write-through disk.
    pub(super) fn set_features(&mut self, features: u64) {
        let flushes = features & feature::FLUSH != 0;
        let sees_writeback = features & feature::CONFIG_WCE != 0;
        self.write_through = !flushes || (sees_writeback && !self.writeback);
        self.cannot_flush = !flushes && sees_writeback;
    }

    /// `struct virtio_blk_config`, 5.2.4.
    pub(super) fn space(&self) -> [u8; CONFIG_BYTES] {
        let mut space = [0; CONFIG_BYTES];
        let mut put = |at: usize, bytes: &[u8]| space[at..at + bytes.len()].copy_from_slice(bytes);
        put(0, &self.capacity_sectors.to_le_bytes());
        put(12, &SEG_MAX.to_le_bytes());
        put(20, &512u32.to_le_bytes());
        // Topology: 2^3 logical blocks of 512 bytes in a physical one, the first of them aligned; at least 8
        // of them in an I/O that is not to be completed from elsewhere.
        put(24, &[3, 0]);
        put(26, &8u16.to_le_bytes());
        put(WRITEBACK_AT, &[u8::from(self.writeback && !self.cannot_flush)]);
        put(34, &self.queues.to_le_bytes());
        // Discard: most sectors, most ranges in a request, alignment that frees space.
        put(36, &OFFERED_RANGE_SECTORS.to_le_bytes());
        put(40, &1u32.to_le_bytes());
        put(44, &BLOCK_SECTORS.to_le_bytes());
        // Write zeroes: the same, and it may free space.
        put(48, &OFFERED_RANGE_SECTORS.to_le_bytes());
        put(52, &1u32.to_le_bytes());
        put(56, &[1]);
        space
    }
}
