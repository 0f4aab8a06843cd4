//! Where fuzzing starts: for each target a few inputs that go right, so that the fuzzer has only to find what goes
//! wrong. Owns no target; what an input means is written beside each body.

use crate::vmm::{self, words32, words64};
use crate::wire;

/// The seeds of a target.
pub fn seeds(target: &str) -> Vec<Vec<u8>> {
    match target {
        "vhost_messages" => vhost_messages(),
        "virtqueue" => (0..8).map(virtqueue).collect(),
        "nbd_handshake" => nbd_handshake(),
        "nbd_transmission" => (0..6).map(nbd_transmission).collect(),
        "meta_attach" => [0, 1, 2, 3, 8, 16].into_iter().flat_map(meta_attach).collect(),
        "qcow2_image" => [None, Some(false), Some(true)].map(qcow2_image).to_vec(),
        "core_ops" => (1..7).map(core_ops).collect(),
        "trace_file" => crate::trace::seeds(),
        "registry_manifest" => crate::registry::seeds(),
        "registry_index" => crate::chunks::index_seeds(),
        "chunk_frame" => crate::chunks::frame_seeds(),
        "stream_packets" => crate::streams::seeds(),
        "ntfs_volume" => crate::ntfs::volume_seeds(),
        "registry_hive" => crate::ntfs::hive_seeds(),
        _ => Vec::new(),
    }
}

/// A message with the descriptors that `fds` stands for: 0 none, 4 an eventfd, 5 the memory, 7 the last received.
fn message(fds: u8, request: u8, payload: &[u8]) -> Vec<u8> {
    [&[fds << 5 | 1, request, payload.len() as u8], payload].concat()
}

fn vhost_messages() -> Vec<Vec<u8>> {
    let index = words64(&[0]);
    let addresses = words64(&[0, vmm::USER, vmm::USER + vmm::USED, vmm::USER + vmm::AVAILABLE, 0]);
    let table = [words32(&[1, 0]), words64(&[0, vmm::MEMORY, vmm::USER, 0])].concat();
    let inflight = words64(&[320, 0, 16 << 16 | 1]);
    let negotiate = [
        vec![0],
        message(0, 1, &[]),
        message(0, 15, &[]),
        message(0, 16, &words64(&[0xb209])),
        message(0, 2, &words64(&[1 << 32 | 3 << 28 | 1 << 30])),
        message(0, 3, &[]),
        message(0, 17, &[]),
        message(0, 36, &[]),
    ]
    .concat();
    let queue = [
        message(5, 37, &vmm::region()),
        message(0, 31, &inflight),
        message(7, 32, &inflight),
        message(0, 8, &words32(&[0, 16])),
        message(0, 10, &words32(&[0, 0])),
        message(0, 9, &addresses),
        message(4, 13, &index),
        message(4, 12, &index),
        message(4, 14, &index),
        message(0, 18, &words32(&[0, 1])),
    ]
    .concat();
    let end = [
        vec![30, 0, 31],
        message(0, 18, &words32(&[0, 0])),
        message(0, 11, &words32(&[0, 0])),
        message(0, 38, &vmm::region()),
        message(0, 34, &[]),
    ]
    .concat();
    let config = [
        message(0, 24, &words32(&[0, 60, 0])),
        message(0, 25, &[words32(&[32, 1, 1]), vec![0]].concat()),
        message(5, 5, &table),
        message(0, 4, &[]),
    ]
    .concat();
    vec![[&negotiate[..], &queue, &end].concat(), [&negotiate[..], &config].concat(), vec![0, 24, 12, 1, 0]]
}

/// Steps of `virtqueue` that write a request of three descriptors at the queue's start, and carry it out.
fn virtqueue(setup: u8) -> Vec<u8> {
    let descriptor = |index: u8, address: u16, len16: u16, rest: u8, flags: u8, next: u8| {
        let [a, b] = address.to_le_bytes();
        let [c, d] = len16.to_le_bytes();
        vec![0, index, a, b, c, d, rest, flags, next]
    };
    let header = |kind: u8, sector: u16| [&[5, 0, kind][..], &sector.to_le_bytes()].concat();
    let run = vec![7, 0, 11, 12, 3, 13, 0];
    // Indices from 16 on are those of a table in scratch memory.
    let indirect = [
        descriptor(16, 0x4000, 1, 0, 1, 1),
        descriptor(17, 0x8000, 64, 0, 1, 2),
        descriptor(18, 0x5000, 0, 1, 2, 0),
        descriptor(0, 0x1000, 3, 0, 4, 0),
        header(1, 9),
        run.clone(),
    ];
    let direct = [
        descriptor(0, 0x4000, 1, 0, 1, 1),
        descriptor(1, 0x8000, 256, 0, 3, 2),
        descriptor(2, 0x5000, 0, 1, 2, 0),
        header(0, 5),
        run.clone(),
        vec![15, 0, 15, 1],
        header(4, 0),
        run,
        vec![15, 2, 15, 3, 15, 5],
    ];
    let steps = if setup & 2 != 0 { [indirect.concat(), direct.concat()].concat() } else { direct.concat() };
    [vec![setup], steps].concat()
}

fn nbd_handshake() -> Vec<Vec<u8>> {
    let option =
        |number: u32, data: &[u8]| [&[number as u8][..], &(data.len() as u16).to_le_bytes(), data].concat();
    let queries = wire::context_query("fuzz", &["base:allocation", "base:"]);
    let go = wire::go("fuzz", &[1, 2, 3]);
    vec![
        [
            vec![0],
            option(wire::OPT_STRUCTURED_REPLY, &[]),
            option(wire::OPT_LIST, &[]),
            option(wire::OPT_LIST_META_CONTEXT, &queries),
            option(wire::OPT_SET_META_CONTEXT, &queries),
            option(wire::OPT_INFO, &go),
            option(wire::OPT_GO, &go),
            vec![240, 28, 0],
            wire::request(0, wire::READ, 1, 0, 512),
        ]
        .concat(),
        [vec![0], option(wire::OPT_STARTTLS, &[]), option(wire::OPT_EXPORT_NAME, b"fuzz")].concat(),
        [vec![1, 1, 0, 0, 0], option(wire::OPT_ABORT, &[]), vec![224 + 6, 255, 255, 1]].concat(),
    ]
}

/// Each command once, then its completions.
fn nbd_transmission(setup: u8) -> Vec<u8> {
    let command = |command: u16, flags: u8, sector: u8, sectors: u16| {
        let [low, high] = sectors.to_le_bytes();
        let mut step = vec![0, command as u8, flags, sector, 0, low, high];
        step.extend((command == wire::WRITE).then_some(0xAB));
        step
    };
    [
        vec![setup],
        command(wire::WRITE, 1, 3, 40),
        command(wire::READ, 0, 0, 200),
        vec![6, 1, 6, 0],
        command(wire::TRIM, 0, 8, 64),
        command(wire::WRITE_ZEROES, 2, 9, 5),
        command(wire::READ, 0, 0, 1300),
        command(wire::READ, 0, 1, 1100),
        vec![6, 0, 6, 0],
        command(wire::BLOCK_STATUS, 8, 0, 250),
        command(wire::BLOCK_STATUS, 0, 0, 250),
        command(wire::FLUSH, 0, 0, 0),
        vec![7, 1, 6, 0, 6, 0, 7, 0],
        command(wire::READ, 4, 250, 51),
        command(wire::READ, 0, 250, 60),
        command(wire::DISC, 0, 0, 0),
    ]
    .concat()
}

fn meta_attach(mode: u8) -> [Vec<u8>; 3] {
    let directory = vec![4, 0, 1];
    let ram = |block: u8, slot: u8| vec![0, block, 0, 2 << 6, slot];
    let overflow = |block: u8, at: u8, checksum: u8| vec![0, block, 0, 3 << 6 | 1, at, checksum];
    [
        vec![mode],
        [vec![mode], directory.clone(), ram(1, 3), ram(2, 4), overflow(7, 7, 0), overflow(9, 9, 1)].concat(),
        [vec![mode], directory, ram(1, 3), ram(2, 3), vec![6, 11, 0, 1, 0, 0, 0, 0, 0, 0, 0], vec![5, 1, 2]]
            .concat(),
    ]
}

/// An image of eight clusters of 512 bytes: plain, zero, untouched, and, if asked for, one compressed (`true`:
/// with zstd).
fn qcow2_image(compressed: Option<bool>) -> Vec<u8> {
    let mut file = vec![0; 512 * 8];
    let mut put = |at: usize, bytes: &[u8]| file[at..at + bytes.len()].copy_from_slice(bytes);
    put(0, b"QFI\xfb");
    put(4, &3u32.to_be_bytes());
    put(20, &9u32.to_be_bytes());
    put(24, &(8u64 * 512).to_be_bytes());
    put(36, &1u32.to_be_bytes());
    put(40, &(3u64 * 512).to_be_bytes());
    put(48, &512u64.to_be_bytes());
    put(56, &1u32.to_be_bytes());
    put(96, &4u32.to_be_bytes());
    put(100, &112u32.to_be_bytes());
    // Refcount table and block, L1 table, L2 table.
    put(512, &1024u64.to_be_bytes());
    (0..8).for_each(|n| put(1024 + 2 * n, &1u16.to_be_bytes()));
    put(3 * 512, &(1u64 << 63 | 4 * 512).to_be_bytes());
    let l2 = |cluster: usize| 4 * 512 + cluster * 8;
    put(l2(0), &(1u64 << 63 | 5 * 512).to_be_bytes());
    put(l2(2), &1u64.to_be_bytes());
    put(l2(3), &(1u64 << 63 | 6 * 512).to_be_bytes());
    put(5 * 512, &[0x11; 1024]);
    if let Some(zstd) = compressed {
        // One further sector may hold some of it, as a stream that gains nothing needs.
        put(l2(5), &(1u64 << 62 | 1 << 61 | (7 * 512 - 64)).to_be_bytes());
        if zstd {
            put(72, &8u64.to_be_bytes());
            put(104, &[1]);
            put(7 * 512 - 64, &[0x28, 0xb5, 0x2f, 0xfd, 0x60, 0, 1, 0x03, 0x10, 0, 0x77]);
        } else {
            put(7 * 512 - 64, &[0x01, 0x00, 0x02, 0xff, 0xfd]);
            put(7 * 512 - 59, &[0x33; 512]);
        }
    }
    file
}

fn core_ops(seed: u64) -> Vec<u8> {
    let mut rng = crate::rng::Rng(seed);
    (0..256 * seed).map(|_| rng.below(256) as u8).collect()
}
