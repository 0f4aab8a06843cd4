//! The transmission phase, clause by clause of `doc/proto.md`, and its limits of memory; each test is named in
//! `docs/nbd-conformance.md`.
#![allow(clippy::unwrap_used)]

mod common;

use common::wire::*;
use common::{Bench, Disk, Pace, Rng, info};
use spillway_core::{Errno, GuestBuffers, Operation, Request};
use spillway_export::ErrorKind;
use spillway_export::nbd::{Budget, Disconnect, Error, ExtentKind, TOKEN_TAG, Work, token_connection};
use std::collections::HashMap;

const KIB: usize = 1 << 10;
const MIB: usize = 1 << 20;
/// The longest request to the disk, and the longest content chunk.
const PIECE: usize = 256 * KIB;
const SIZE: usize = 64 * MIB;

const EIO: u32 = 5;
const EINVAL: u32 = 22;
const ENOSPC: u32 = 28;
const EOVERFLOW: u32 = 75;
const ENOTSUP: u32 = 95;

fn pattern(len: usize, seed: u64) -> Vec<u8> {
    let mut rng = Rng::new(seed);
    (0..len.div_ceil(8)).flat_map(|_| rng.next().to_le_bytes()).take(len).collect()
}

fn simple_reply(error: u32, cookie: u64) -> Vec<u8> {
    [&[0x67, 0x44, 0x66, 0x98][..], &error.to_be_bytes(), &cookie.to_be_bytes()].concat()
}

#[test]
fn simple_replies_for_a_client_without_structured_ones() {
    let mut bench = Bench::negotiated(SIZE, false, false);
    let data = pattern(8192, 1);
    let cookie = 0x0123_4567_89ab_cdef;
    assert_eq!(bench.exchange(&write(0, cookie, 4096, &data)), simple_reply(0, cookie));
    let reply = bench.exchange(&request(0, READ, !cookie, 4096, 8192));
    assert_eq!(reply, [simple_reply(0, !cookie), data].concat());
    assert_eq!(bench.exchange(&request(0, FLUSH, 3, 0, 0)), simple_reply(0, 3));
    assert_eq!(bench.exchange(&request(0, TRIM, 4, 0, 4096)), simple_reply(0, 4));
    assert_eq!(bench.exchange(&request(0, WRITE_ZEROES, 5, 0, 4096)), simple_reply(0, 5));
    assert_eq!(bench.exchange(&request(0, READ, 6, 100, 512)), simple_reply(EINVAL, 6));
    assert_eq!(bench.exchange(&write(0, 7, SIZE as u64, &[0; 512])), simple_reply(ENOSPC, 7));
    // Flags and commands that need what was not agreed on.
    assert_eq!(bench.exchange(&request(DF, READ, 8, 0, 512)), simple_reply(EINVAL, 8));
    assert_eq!(bench.exchange(&request(0, BLOCK_STATUS, 9, 0, 512)), simple_reply(EINVAL, 9));
    assert_eq!(bench.exchange(&request(0, READ, 10, 0, (32 * MIB + 512) as u32)), simple_reply(EINVAL, 10));
}

/// As the Linux kernel's client does: the next one is asked for before the one before it has come.
#[test]
fn long_simple_reads_one_behind_the_other_are_all_gathered() {
    let mut bench = Bench::negotiated(SIZE, false, false);
    bench.shrink_socket();
    bench.disk.bytes = pattern(SIZE, 2);
    let len = 4 * MIB;
    let bad = (4 * len / 512 - 1) as u64;
    bench.disk.fault = Some((bad..bad + 1, Errno::IO));
    let asked = (0..6).flat_map(|n| request(0, READ, n, n * len as u64, len as u32));
    bench.send(&asked.collect::<Vec<_>>());
    bench.settle();
    let expected = (0..6).flat_map(|n: usize| match n {
        3 => simple_reply(EIO, 3).to_vec(),
        _ => [&simple_reply(0, n as u64)[..], &bench.disk.bytes[n * len..][..len]].concat(),
    });
    assert!(bench.received == expected.collect::<Vec<_>>() && bench.ended.is_none(), "{:?}", bench.ended);
}

#[test]
fn a_long_simple_read_knows_its_error_before_its_header_or_ends_the_connection() {
    for (len, pace) in
        [(MIB + 512, Pace::AtOnce), (4 * MIB, Pace::Later), (7 * MIB, Pace::Later), (32 * MIB, Pace::AtOnce)]
    {
        // What is gathered is read at once, and answered when all of it is there.
        let streams = len > 4 * MIB;
        let mut bench = Bench::negotiated(SIZE, false, false);
        bench.disk.bytes = pattern(SIZE, 2);
        let ask = request(0, READ, 1, 512, len as u32);
        let read = |bench: &mut Bench| {
            bench.disk.pace = pace;
            bench.received.clear();
            bench.send(&ask);
            let mut rng = Rng::new(3);
            while bench.disk.complete_one(&mut bench.connection, &mut rng) {
                bench.turn();
                assert!(!bench.receive() || streams || bench.disk.waiting.is_empty());
                assert!(!streams || bench.disk.waiting.len() <= 1, "one piece at a time");
            }
            bench.settle();
            bench.disk.pace = Pace::AtOnce;
        };
        read(&mut bench);
        let data = bench.disk.bytes[512..512 + len].to_vec();
        assert!(bench.received == [simple_reply(0, 1), data].concat());
        // A sector cannot be read: an error, no data, and the connection goes on.
        let (first, last) = (8, (512 + len) as u64 / 512 - 1);
        for bad in if streams { vec![first] } else { vec![first, last] } {
            bench.disk.fault = Some((bad..bad + 1, Errno::IO));
            read(&mut bench);
            assert_eq!(bench.received, simple_reply(EIO, 1));
            assert_eq!(bench.exchange(&request(0, FLUSH, 2, 0, 0)), simple_reply(0, 2));
        }
        if streams {
            // What is there of the reply cannot be taken for the whole.
            bench.disk.fault = Some((last..last + 1, Errno::IO));
            read(&mut bench);
            assert!(bench.received.len() < 16 + len);
            assert!(
                matches!(bench.ended, Some(Disconnect::Fault(Error { kind: ErrorKind::LateReadError, .. }))),
                "{:?}",
                bench.ended
            );
            assert_eq!(bench.connection.unfinished(), 0);
        }
    }
}

#[test]
fn structured_reads_in_chunks() {
    let mut bench = Bench::negotiated(SIZE, true, false);
    bench.disk.bytes = pattern(SIZE, 4);
    for (offset, len) in [(0, 512), (512, 4096), (0, MIB), (512, MIB + 512), (SIZE - 32 * MIB, 32 * MIB)] {
        let answer = bench.ask(&request(0, READ, 5, offset as u64, len as u32));
        assert_eq!((answer.cookie, answer.error, answer.structured), (5, 0, true));
        assert!(answer.data(offset as u64, len) == bench.disk.bytes[offset..offset + len]);
        assert_eq!(answer.chunks.len(), len.div_ceil(PIECE));
    }
}

#[test]
fn a_read_with_df_is_one_chunk_or_none() {
    let mut bench = Bench::negotiated(SIZE, true, false);
    for len in [512, 65_536, PIECE] {
        let answer = bench.ask(&request(DF, READ, 1, 0, len as u32));
        assert_eq!((answer.error, answer.chunks.len()), (0, 1));
    }
    let answer = bench.ask(&request(DF, READ, 1, 0, (PIECE + 512) as u32));
    assert_eq!((answer.error, answer.chunks.len()), (EOVERFLOW, 0));
}

#[test]
fn a_structured_read_that_fails_in_the_middle_has_one_error_chunk_at_its_end() {
    let mut bench = Bench::negotiated(SIZE, true, false);
    for (pieces, bad) in [(1, 0), (4, 0), (4, 2), (4, 3)] {
        for pace in [Pace::AtOnce, Pace::Later] {
            bench.disk.pace = pace;
            let at = (bad * PIECE / 512) as u64;
            bench.disk.fault = Some((at + 1..at + 2, Errno::IO));
            bench.received.clear();
            bench.send(&request(0, READ, 9, 0, (pieces * PIECE) as u32));
            while !bench.disk.waiting.is_empty() {
                bench.disk.complete_one(&mut bench.connection, &mut Rng::new(bad as u64));
                bench.turn();
            }
            bench.settle();
            let mut answers = Answers::default();
            assert_eq!(
                answers.take(&bench.received, |_| panic!("a simple reply to a read")),
                bench.received.len()
            );
            assert_eq!(answers.done.len(), 1);
            assert_eq!(answers.done[0].error, EIO);
            assert!(
                answers.done[0].chunks.iter().all(|chunk| chunk.0 != at * 512),
                "no data for what failed"
            );
        }
    }
}

#[test]
fn writes_reach_the_disk_whatever_their_length() {
    for structured in [false, true] {
        let mut bench = Bench::negotiated(SIZE, structured, false);
        for (offset, len) in
            [(512, 512), (4096, 4096), (0, MIB), (512, MIB + 512), (SIZE - 32 * MIB, 32 * MIB)]
        {
            let data = pattern(len, len as u64);
            assert_eq!(bench.exchange(&write(0, 6, offset as u64, &data)), simple_reply(0, 6));
            assert!(bench.disk.bytes[offset..offset + len] == data);
        }
        assert!(bench.disk.log.iter().all(|request| request.sectors as usize * 512 <= PIECE));
    }
}

#[test]
fn a_write_that_fails_in_the_middle_is_answered_once_and_the_next_request_is_found() {
    for pace in [Pace::AtOnce, Pace::Later] {
        let mut bench = Bench::negotiated(SIZE, true, false);
        bench.disk.fault = Some((4096..4097, Errno::NO_SPACE));
        bench.disk.pace = pace;
        let bytes = [write(0, 1, 0, &pattern(8 * MIB, 5)), request(0, FLUSH, 2, 0, 0)].concat();
        let mut at = 0;
        while at < bytes.len() || bench.connection.unfinished() > 0 {
            at += bench.send_until_stuck(&bytes[at..]);
            bench.disk.complete_all(&mut bench.connection);
        }
        bench.settle();
        let mut answers = Answers::default();
        assert_eq!(answers.take(&bench.received, |_| 0), bench.received.len());
        let errors: Vec<_> = answers.done.iter().map(|answer| (answer.cookie, answer.error)).collect();
        assert_eq!(errors, [(1, ENOSPC), (2, 0)]);
        if pace == Pace::AtOnce {
            // Nothing of it was tried after the failure.
            assert_eq!(bench.disk.log.iter().filter(|request| request.sectors > 0).count(), 9);
        }
    }
}

#[test]
fn ranges_are_checked() {
    let end = SIZE as u64;
    let mut bench = Bench::negotiated(SIZE, true, true);
    for (command, beyond) in
        [(READ, EINVAL), (WRITE, ENOSPC), (TRIM, EINVAL), (WRITE_ZEROES, ENOSPC), (BLOCK_STATUS, EINVAL)]
    {
        for (offset, len, error) in [
            (end, 512, beyond),
            (end - 512, 1024, beyond),
            (u64::MAX - 511, 1024, beyond),
            (u64::MAX - 511, 512, beyond),
            (1 << 63, 4096, beyond),
            (1, 512, EINVAL),
            (256, 512, EINVAL),
            (0, 511, EINVAL),
            (0, 1, EINVAL),
            (u64::MAX, 1, EINVAL),
            (end - 512, 512, 0),
        ] {
            let bytes = match command {
                WRITE => write(0, 1, offset, &vec![0; len]),
                _ => request(0, command, 1, offset, len as u32),
            };
            assert_eq!(bench.ask(&bytes).error, error, "command {command} at {offset} of {len}");
        }
    }
    // Longer than the payload limit where there is no payload.
    let huge = u32::MAX - 511;
    assert_eq!(bench.ask(&request(0, TRIM, 1, 0, huge)).error, EINVAL);
    assert_eq!(bench.ask(&request(0, WRITE_ZEROES, 1, 0, huge)).error, ENOSPC);
    assert_eq!(bench.ask(&request(0, BLOCK_STATUS, 1, 0, huge)).error, EINVAL);
    assert_eq!(bench.ask(&request(0, READ, 1, 0, (32 * MIB + 512) as u32)).error, EOVERFLOW);
    assert_eq!(bench.ask(&request(0, TRIM, 1, 0, SIZE as u32)).error, 0);
    assert_eq!(bench.ask(&request(0, WRITE_ZEROES, 1, 0, SIZE as u32)).error, 0);
}

#[test]
fn four_gigabytes_less_a_sector_are_discarded_in_one_request() {
    // No byte array: only what is handed out is looked at.
    let mut bench = Bench::negotiated(4096, true, false);
    let (server, client) = std::os::unix::net::UnixStream::pair().unwrap();
    let info = spillway_export::nbd::ExportInfo { size_bytes: 1 << 42, ..info(512) };
    bench.connection =
        spillway_export::nbd::Connection::new(server.into(), info, 0xfffe, &Default::default()).unwrap();
    bench.client = client;
    bench.client.set_nonblocking(true).unwrap();
    bench.send(&[client_flags(3), option(OPT_STRUCTURED_REPLY, &[]), option(OPT_GO, &go("", &[]))].concat());
    for (command, operation) in
        [(TRIM, Operation::Discard), (WRITE_ZEROES, Operation::WriteZeroes { fua: false })]
    {
        let offset = (1u64 << 42) - (1 << 32);
        std::io::Write::write_all(&mut bench.client, &request(0, command, 1, offset, u32::MAX - 511))
            .unwrap();
        bench.connection.on_readable().unwrap();
        let Some(Work::Request(got)) = bench.connection.next() else { panic!("no request") };
        assert_eq!((got.operation, got.sector, got.sectors), (operation, offset / 512, (1 << 23) - 1));
        assert_eq!(got.token.0 >> 56, u64::from(TOKEN_TAG));
        assert_eq!(token_connection(got.token), 0xfffe);
        bench.connection.complete(got.token, Ok(()));
        bench.connection.flush_output().unwrap();
    }
}

#[test]
fn zero_lengths_are_answered_and_do_nothing() {
    let mut bench = Bench::negotiated(SIZE, true, true);
    for offset in [0, SIZE as u64] {
        for command in [READ, WRITE, TRIM, WRITE_ZEROES] {
            let answer = bench.ask(&request(0, command, 1, offset, 0));
            assert_eq!((answer.error, answer.chunks.len()), (0, 0), "command {command}");
            assert!(answer.structured || command != READ);
        }
    }
    assert_eq!(bench.ask(&request(0, BLOCK_STATUS, 1, 0, 0)).error, EINVAL);
    assert!(bench.disk.log.is_empty());
    let mut bench = Bench::negotiated(SIZE, false, false);
    assert_eq!(bench.exchange(&request(0, READ, 1, 0, 0)), simple_reply(0, 1));
}

#[test]
fn flags_are_checked_by_command() {
    let mut bench = Bench::negotiated(SIZE, true, true);
    let allowed = [
        (READ, FUA | DF),
        (WRITE, FUA),
        (FLUSH, FUA),
        (TRIM, FUA),
        (WRITE_ZEROES, FUA | NO_HOLE | FAST_ZERO),
        (BLOCK_STATUS, FUA | REQ_ONE),
    ];
    for (command, allowed) in allowed {
        for bit in 0..16 {
            let flag = 1 << bit;
            let len = if command == FLUSH { 0 } else { 512 };
            let mut bytes = request(flag, command, 1, 0, len);
            if command == WRITE {
                bytes.extend([0; 512]);
            }
            let expected = if allowed & flag != 0 { 0 } else { EINVAL };
            assert_eq!(bench.ask(&bytes).error, expected, "command {command}, flag {flag:#x}");
        }
    }
}

#[test]
fn commands_that_are_not_known_are_invalid() {
    let mut bench = Bench::negotiated(SIZE, true, true);
    for command in [CACHE, 8, 9, 255, u16::MAX] {
        assert_eq!(bench.ask(&request(0, command, 1, 0, 512)).error, EINVAL);
    }
    assert_eq!(bench.ask(&request(0, FLUSH, 1, 512, 0)).error, EINVAL);
    assert_eq!(bench.ask(&request(0, FLUSH, 1, 0, 512)).error, EINVAL);
    assert!(bench.disk.log.is_empty());
}

#[test]
fn fua_goes_to_the_disk() {
    let mut bench = Bench::negotiated(SIZE, true, false);
    bench.exchange(&write(FUA, 1, 0, &vec![1; PIECE + 512]));
    bench.exchange(&request(FUA, WRITE_ZEROES, 2, 0, 512));
    bench.exchange(&write(0, 3, 0, &[1; 512]));
    let operations: Vec<_> = bench.disk.log.drain(..).map(|request| request.operation).collect();
    let (fua, not) = (Operation::Write { fua: true }, Operation::Write { fua: false });
    assert_eq!(operations, [fua, fua, Operation::WriteZeroes { fua: true }, not]);
    // A trim is followed by a flush, and answered after it.
    bench.disk.pace = Pace::Later;
    assert_eq!(bench.exchange(&request(FUA, TRIM, 4, 0, 4096)), []);
    bench.disk.complete_all(&mut bench.connection);
    assert_eq!(bench.connection.unfinished(), 0);
    assert_eq!(bench.exchange(&[]), []);
    assert_eq!(bench.connection.unfinished(), 1);
    bench.disk.complete_all(&mut bench.connection);
    assert_eq!(bench.exchange(&[]), simple_reply(0, 4));
    let operations: Vec<_> = bench.disk.log.drain(..).map(|request| request.operation).collect();
    assert_eq!(operations, [Operation::Discard, Operation::Flush]);
    // Not when the trim failed.
    bench.disk.pace = Pace::AtOnce;
    bench.disk.fault = Some((0..1, Errno::IO));
    assert_eq!(bench.ask(&request(FUA, TRIM, 5, 0, 4096)).error, EIO);
    assert_eq!(bench.disk.log.len(), 1);
}

#[test]
fn errors_are_those_that_the_protocol_has() {
    let mut bench = Bench::negotiated(SIZE, true, false);
    for (errno, expected) in [
        (Errno::IO, EIO),
        (Errno::NO_SPACE, ENOSPC),
        (Errno::INVALID, EINVAL),
        (Errno::FAULT, EIO),
        (Errno(117), EIO),
    ] {
        bench.disk.fault = Some((0..8, errno));
        assert_eq!(bench.ask(&request(0, READ, 1, 0, 4096)).error, expected);
        assert_eq!(bench.ask(&write(0, 1, 0, &[0; 4096])).error, expected);
        assert_eq!(bench.ask(&request(0, WRITE_ZEROES, 1, 0, 4096)).error, expected);
    }
    // ENOTSUP is for fast zeroes only.
    bench.disk.fault = Some((0..8, Errno::NOT_SUPPORTED));
    assert_eq!(bench.ask(&request(FAST_ZERO, WRITE_ZEROES, 1, 0, 4096)).error, ENOTSUP);
    assert_eq!(bench.ask(&request(0, WRITE_ZEROES, 1, 0, 4096)).error, EINVAL);
    assert_eq!(bench.ask(&request(0, TRIM, 1, 0, 4096)).error, EINVAL);
}

#[test]
fn block_status_tells_extents() {
    let mut bench = Bench::negotiated(SIZE, true, true);
    bench.disk.bytes[8 * KIB..20 * KIB].fill(1);
    let kib = |n: u32| n << 10;
    let answer = bench.ask(&request(0, BLOCK_STATUS, 1, 4096, kib(28)));
    assert_eq!(answer.extents, [(kib(4), 3), (kib(12), 0), (kib(12), 3)]);
    assert!(answer.structured && answer.error == 0);
    // Not at block edges, and not past the end of the range.
    let answer = bench.ask(&request(0, BLOCK_STATUS, 1, 9 * KIB as u64 + 512, kib(11)));
    assert_eq!(answer.extents, [(kib(10) + 512, 0), (512, 3)]);
    let answer = bench.ask(&request(REQ_ONE, BLOCK_STATUS, 1, 4096, kib(28)));
    assert_eq!(answer.extents, [(kib(4), 3)]);
    let answer = bench.ask(&request(REQ_ONE, BLOCK_STATUS, 1, 8192, 512));
    assert_eq!(answer.extents, [(512, 0)]);
    let answer = bench.ask(&request(0, BLOCK_STATUS, 1, 0, SIZE as u32));
    assert_eq!(answer.extents, [(kib(8), 3), (kib(12), 0), ((SIZE - 20 * KIB) as u32, 3)]);
}

#[test]
fn block_status_is_bounded_and_never_empty() {
    let mut bench = Bench::negotiated(SIZE, true, true);
    let mut ask = |one: u16, extents: Vec<(u64, ExtentKind)>| {
        std::io::Write::write_all(&mut bench.client, &request(one, BLOCK_STATUS, 1, 0, SIZE as u32)).unwrap();
        bench.connection.on_readable().unwrap();
        let Some(Work::BlockStatus { id, offset: 0, len, one: asked_one }) = bench.connection.next() else {
            panic!("no block status")
        };
        assert_eq!((len, asked_one), (SIZE as u64, one != 0));
        assert_eq!(bench.connection.unfinished(), 1);
        bench.connection.answer_block_status(id, extents.into_iter());
        assert_eq!(bench.connection.unfinished(), 0);
        bench.received.clear();
        bench.settle();
        let mut answers = Answers::default();
        answers.take(&bench.received, |_| 0);
        answers.done.pop().unwrap().extents
    };
    let (data, zero) = (ExtentKind::Data, ExtentKind::Zero);
    assert_eq!(ask(0, vec![]), [(SIZE as u32, 0)]);
    assert_eq!(ask(0, vec![(0, data), (0, zero)]), [(SIZE as u32, 0)]);
    assert_eq!(ask(0, vec![(u64::MAX, zero), (u64::MAX, data)]), [(SIZE as u32, 3)]);
    assert_eq!(ask(0, vec![(512, zero), (0, data), (512, zero), (512, data)]), [(1024, 3), (512, 0)]);
    assert_eq!(ask(REQ_ONE, vec![(0, data), (512, zero), (512, zero), (512, data)]), [(1024, 3)]);
    let many: Vec<_> = (0..100_000).map(|n| (512, if n % 2 == 0 { data } else { zero })).collect();
    let extents = ask(0, many);
    assert_eq!(extents.len(), 64);
    assert!(extents.iter().all(|extent| extent.0 == 512));
}

#[test]
fn block_status_needs_a_context() {
    let mut bench = Bench::negotiated(SIZE, true, false);
    assert_eq!(bench.ask(&request(0, BLOCK_STATUS, 1, 0, 4096)).error, EINVAL);
}

#[test]
fn a_disconnect_waits_for_what_is_outstanding() {
    let mut bench = Bench::negotiated(SIZE, true, false);
    bench.disk.pace = Pace::Later;
    let bytes = [
        write(0, 1, 0, &[1; 4096]),
        request(FUA, TRIM, 2, 0, 4096),
        request(0, READ, 3, 0, 2 * PIECE as u32),
        request(FUA | DF, DISC, 4, 0, 0),
        // Not allowed after a disconnect, and not looked at.
        request(0, FLUSH, 5, 0, 0),
    ]
    .concat();
    bench.send(&bytes);
    bench.settle();
    assert!(bench.ended.is_none() && !bench.connection.wants_read());
    assert_eq!(bench.connection.unfinished(), 4);
    let mut rng = Rng::new(1);
    while bench.disk.complete_one(&mut bench.connection, &mut rng) {
        assert!(bench.ended.is_none());
        bench.turn();
    }
    bench.settle();
    assert!(matches!(bench.ended, Some(Disconnect::Finished)), "{:?}", bench.ended);
    let mut answers = Answers::default();
    answers.take(&bench.received, |_| 0);
    let mut cookies: Vec<_> = answers.done.iter().map(|answer| answer.cookie).collect();
    cookies.sort();
    assert_eq!(cookies, [1, 2, 3]);
}

#[test]
fn a_client_that_leaves_without_a_word_ends_the_connection() {
    // At a request's edge, inside a header, inside a payload.
    for bytes in
        [vec![], request(0, READ, 1, 0, 512)[..13].to_vec(), write(0, 1, 0, &[0; 4096])[..2000].to_vec()]
    {
        let mut bench = Bench::negotiated(SIZE, true, false);
        bench.send(&bytes);
        bench.client.shutdown(std::net::Shutdown::Both).unwrap();
        bench.turn();
        assert!(matches!(bench.ended, Some(Disconnect::Closed)), "{:?}", bench.ended);
        assert!(!bench.connection.wants_read() && !bench.connection.wants_write());
        assert!(bench.connection.on_readable().is_err() && bench.connection.next().is_none());
    }
    // What was said before counts, a disconnect included.
    let mut bench = Bench::negotiated(SIZE, true, false);
    let bytes = [write(0, 1, 0, &[9; 4096]), request(0, DISC, 2, 0, 0)].concat();
    std::io::Write::write_all(&mut bench.client, &bytes).unwrap();
    bench.client.shutdown(std::net::Shutdown::Write).unwrap();
    bench.settle();
    assert!(matches!(bench.ended, Some(Disconnect::Finished)), "{:?}", bench.ended);
    assert_eq!(bench.disk.bytes[4095], 9);
}

#[test]
fn a_hangup_ends_a_connection_that_does_not_read() {
    let mut bench = Bench::negotiated(SIZE, true, false);
    bench.disk.pace = Pace::Later;
    bench.send_until_stuck(&write(0, 1, 0, &vec![1; 8 * MIB]));
    assert!(!bench.connection.wants_read());
    assert!(bench.connection.on_hangup().is_err());
    // Withdrawn by the disk: forgotten without an answer.
    for request in std::mem::take(&mut bench.disk.waiting) {
        bench.connection.complete(request.token, Err(Errno::CANCELED));
    }
    assert_eq!(bench.connection.unfinished(), 0);
    assert!(!bench.receive());
    // After a disconnect the work goes on.
    let mut bench = Bench::negotiated(SIZE, true, false);
    bench.disk.pace = Pace::Later;
    bench
        .send(&[write(0, 1, 0, &[1; 4096]), request(0, READ, 2, 0, 512), request(0, DISC, 3, 0, 0)].concat());
    bench.turn();
    assert!(bench.connection.on_hangup().is_ok());
    assert_eq!(bench.connection.unfinished(), 2);
    // Though nobody can be told any more.
    drop(std::mem::replace(&mut bench.client, std::os::unix::net::UnixStream::pair().unwrap().0));
    bench.disk.complete_at(&mut bench.connection, 1);
    bench.turn();
    assert!(bench.ended.is_none(), "the write is still to be carried out");
    bench.disk.complete_all(&mut bench.connection);
    bench.turn();
    assert!(matches!(bench.ended, Some(Disconnect::Finished)), "{:?}", bench.ended);
    assert_eq!(bench.disk.bytes[..4096], [1; 4096]);
}

#[test]
fn withdrawn_requests_are_not_answered() {
    for (structured, gathered) in [(false, MIB), (false, 0), (true, 0)] {
        let mut bench = Bench::agreed_within(SIZE, structured, false, &Budget::with_gathered_bytes(gathered));
        bench.disk.pace = Pace::Later;
        bench.send(&[request(0, READ, 1, 0, (PIECE + 512) as u32), write(0, 2, 0, &[1; 512])].concat());
        let waiting = std::mem::take(&mut bench.disk.waiting);
        // Of a read that streams only the first piece is there.
        assert_eq!(waiting.len(), if structured || gathered > 0 { 3 } else { 2 });
        for request in waiting {
            bench.connection.complete(request.token, Err(Errno::CANCELED));
        }
        assert_eq!(bench.exchange(&[]), []);
        assert_eq!(bench.connection.unfinished(), 0);
    }
}

#[test]
fn a_wrong_magic_number_or_an_endless_payload_ends_the_connection() {
    for (bytes, kind) in [
        (vec![0; 28], ErrorKind::Protocol),
        (vec![0xff; 40], ErrorKind::Protocol),
        (request(0, WRITE, 1, 0, 32 * MIB as u32 + 1), ErrorKind::Limit),
        (request(0, WRITE, 1, 0, u32::MAX), ErrorKind::Limit),
    ] {
        let mut bench = Bench::negotiated(SIZE, true, false);
        assert_eq!(bench.exchange(&bytes), []);
        let Some(Disconnect::Fault(error)) = bench.ended else { panic!("{:?}", bench.ended) };
        assert_eq!(error.kind, kind, "{error}");
    }
}

#[test]
fn the_buffers_of_a_request_are_reached_inside_their_length_only() {
    let mut bench = Bench::negotiated(SIZE, true, false);
    bench.disk.pace = Pace::Later;
    bench.send(&write(0, 1, 0, &[7; 1536]));
    let token = bench.disk.waiting[0].token;
    let mut bytes = [0; 1536];
    assert_eq!(bench.connection.copy_from_guest(token, 0, &mut bytes), Ok(()));
    assert_eq!(bytes, [7; 1536]);
    assert_eq!(bench.connection.copy_from_guest(token, 1, &mut bytes), Err(Errno::FAULT));
    assert_eq!(bench.connection.zero_guest(token, 1535, 2), Err(Errno::FAULT));
    assert_eq!(bench.connection.zero_guest(token, u32::MAX, u32::MAX), Err(Errno::FAULT));
    assert_eq!(bench.connection.copy_to_guest(spillway_core::Token(token.0 + 1), 0, &[1]), Err(Errno::FAULT));
    assert_eq!(bench.connection.data(token, 512, 1024).map(|bytes| bytes.len()), Ok(1024));
    // A flush has none.
    bench.send(&request(0, FLUSH, 2, 0, 0));
    let token = bench.disk.waiting[1].token;
    assert_eq!(bench.connection.zero_guest(token, 0, 1), Err(Errno::FAULT));
}

/// What the connection holds for its unfinished requests.
fn held(disk: &Disk) -> usize {
    disk.waiting.iter().map(|request| request.sectors as usize * 512).sum()
}

#[test]
fn waiting_writes_hold_little_in_ordinary_flow() {
    for len in [4 * KIB, 64 * KIB, MIB, 32 * MIB] {
        let mut bench = Bench::negotiated(SIZE, true, false);
        bench.disk.pace = Pace::Later;
        let bytes = write(0, 1, 0, &vec![1; len]).repeat(96 * MIB / len);
        let sent = bench.send_until_stuck(&bytes);
        assert!(sent < 10 * MIB, "{sent} bytes were taken in");
        let held = held(&bench.disk);
        assert!((MIB..MIB + PIECE).contains(&held), "{held}");
        assert!(!bench.connection.wants_read() && !bench.connection.wants_write());
        // And it all goes on.
        let mut at = sent;
        while at < bytes.len() || bench.connection.unfinished() > 0 {
            bench.disk.complete_all(&mut bench.connection);
            at += bench.send_until_stuck(&bytes[at..]);
            bench.receive();
        }
        bench.settle();
        assert!(bench.received == simple_reply(0, 1).repeat(96 * MIB / len));
    }
}

#[test]
fn a_discard_behind_waiting_writes_is_read_while_the_disk_is_full() {
    let mut bench = Bench::negotiated(SIZE, true, false);
    bench.disk.pace = Pace::Later;
    let writes = write(0, 1, 0, &vec![1; MIB]).repeat(3);
    let first = bench.send_until_stuck(&writes);
    assert!(first < writes.len());
    bench.connection.set_disk_full(true);
    bench.disk.completed = true;
    let bytes = [&writes[first..], &request(0, TRIM, 2, 0, 4096), &request(0, FLUSH, 3, 0, 0)].concat();
    assert_eq!(bench.send_until_stuck(&bytes), bytes.len());
    let last: Vec<_> = bench.disk.waiting.iter().rev().take(2).map(|request| request.operation).collect();
    assert_eq!(last, [Operation::Flush, Operation::Discard]);
    // Up to 4 MiB and no more.
    let more = write(0, 1, 0, &vec![1; MIB]).repeat(10);
    bench.send_until_stuck(&more);
    assert!(held(&bench.disk) <= 4 * MIB, "{}", held(&bench.disk));
    // Room again: what waits is completed, and it goes on as before.
    bench.connection.set_disk_full(false);
    bench.disk.complete_all(&mut bench.connection);
    bench.settle();
    assert!(held(&bench.disk) <= 2 * MIB);
}

#[test]
fn small_requests_are_bounded_in_number() {
    for (full, most) in [(false, 256), (true, 1024)] {
        let mut bench = Bench::negotiated(SIZE, true, false);
        bench.connection.set_disk_full(full);
        bench.disk.pace = Pace::Later;
        bench.send_until_stuck(&request(0, TRIM, 1, 0, 512).repeat(40_000));
        assert_eq!(bench.connection.unfinished(), most);
        bench.disk.pace = Pace::AtOnce;
        bench.disk.complete_all(&mut bench.connection);
        bench.settle();
        assert_eq!(bench.connection.unfinished(), 0);
        assert!(bench.connection.wants_read());
    }
}

#[test]
fn a_client_that_does_not_read_its_replies_is_stopped() {
    for (structured, len) in [(true, 4 * KIB), (true, 32 * MIB), (false, 4 * KIB), (false, MIB)] {
        let mut bench = Bench::negotiated(SIZE, structured, false);
        bench.shrink_socket();
        let count = 128 * MIB / len;
        bench.send_until_stuck(&request(0, READ, 1, 0, len as u32).repeat(count));
        let handed_out: usize = bench.disk.log.iter().map(|request| request.sectors as usize * 512).sum();
        assert!(handed_out <= 2 * MIB, "{handed_out} bytes were read ahead");
        assert!(bench.connection.wants_write() && !bench.connection.wants_read());
        assert!(bench.ended.is_none());
    }
}

#[test]
fn long_commands_of_both_kinds_pass_each_other_through_small_buffers() {
    // Reads and writes of 32 MiB at once, sent by a client that reads its replies when it cannot send.
    let mut bench = Bench::negotiated(SIZE, true, false);
    bench.shrink_socket();
    bench.disk.pace = Pace::Later;
    let data = pattern(32 * MIB, 8);
    bench.disk.bytes[..32 * MIB].copy_from_slice(&data);
    let mut bytes = Vec::new();
    for round in 0..3 {
        bytes.extend(write(0, round * 2, 32 * MIB as u64, &data));
        bytes.extend(request(0, READ, round * 2 + 1, 0, 32 * MIB as u32));
    }
    let (mut at, mut most) = (0, 0);
    let mut answers = Answers::default();
    let mut rng = Rng::new(2);
    while answers.done.len() < 6 {
        at += bench.send_until_stuck(&bytes[at..]);
        most = most.max(held(&bench.disk));
        for _ in 0..rng.below(4) {
            bench.disk.complete_one(&mut bench.connection, &mut rng);
        }
        bench.turn();
        bench.receive();
        let taken = answers.take(&bench.received, |_| 0);
        bench.received.drain(..taken);
    }
    assert!(most <= 2 * MIB, "{most}");
    for answer in answers.done {
        assert_eq!(answer.error, 0);
        assert!(answer.cookie % 2 == 0 || answer.data(0, 32 * MIB) == data);
    }
    assert!(bench.disk.bytes[32 * MIB..] == data);
}

#[test]
fn a_long_simple_read_passes_writes_that_wait_and_no_reply_comes_between() {
    for len in [2 * MIB, 8 * MIB] {
        let mut bench = Bench::negotiated(SIZE, false, false);
        bench.disk.bytes = pattern(SIZE, 5);
        bench.connection.set_disk_full(true);
        bench.disk.pace = Pace::Later;
        let writes: Vec<u8> =
            (1..=3).flat_map(|n| write(0, n, (n - 1) * MIB as u64, &vec![1; MIB])).collect();
        let (read, trim) =
            (request(0, READ, 8, 4 * MIB as u64, len as u32), request(0, TRIM, 9, 32 * MIB as u64, 4096));
        let bytes = [writes, read, trim].concat();
        assert_eq!(bench.send_until_stuck(&bytes), bytes.len());
        let finish = |bench: &mut Bench, which: &dyn Fn(&Request) -> bool| {
            let at = bench.disk.waiting.iter().position(which).unwrap();
            bench.disk.complete_at(&mut bench.connection, at);
        };
        // Room may come by what is behind it.
        assert!(bench.disk.waiting.iter().any(|request| request.operation == Operation::Discard));
        let pieces = len / PIECE;
        for piece in 0..pieces {
            finish(&mut bench, &|request| request.operation == Operation::Read);
            bench.settle();
            // The second write comes back meanwhile.
            if piece == pieces / 2 {
                for _ in 0..MIB / PIECE {
                    finish(&mut bench, &|request| request.sector * 512 / MIB as u64 == 1);
                }
                bench.settle();
            }
        }
        let data = pattern(SIZE, 5)[4 * MIB..4 * MIB + len].to_vec();
        let (read, write) = ([simple_reply(0, 8), data].concat(), simple_reply(0, 2));
        let expected = if len > 4 * MIB { [read, write] } else { [write, read] };
        assert!(bench.received == expected.concat(), "{len}: another reply, or in the middle of this one");
        bench.received.clear();
        bench.disk.complete_all(&mut bench.connection);
        bench.settle();
        assert_eq!(bench.received.len(), 3 * 16);
        assert!(
            [1, 3, 9].iter().all(|&n| bench.received.chunks(16).any(|reply| reply == simple_reply(0, n)))
        );
    }
}

#[test]
fn a_client_that_reads_no_reply_does_not_stop_the_others() {
    for structured in [false, true] {
        let budget = Budget::new();
        let mut idle: Vec<Bench> = (0..4).map(|_| Bench::sharing(info(SIZE), &budget)).collect();
        for (n, bench) in idle.iter_mut().enumerate() {
            bench.agree(n % 2 == 0, false);
            bench.shrink_socket();
            bench.send_until_stuck(&request(0, READ, 1, 0, 32 * MIB as u32).repeat(4));
        }
        assert!(budget.used_bytes() > 1 << 20);
        let mut bench = Bench::sharing(info(SIZE), &budget);
        bench.agree(structured, false);
        for len in [512, 4096, MIB, 32 * MIB] {
            let read = bench.exchange(&request(0, READ, 2, 0, len as u32));
            assert!(bench.ended.is_none() && read.len() > len);
            let written = bench.exchange(&write(0, 3, 0, &vec![1; len]));
            assert!(bench.ended.is_none() && !written.is_empty());
        }
    }
}

/// A model client: random commands, right and wrong, in random portions, against a disk that completes in random
/// order, with a client that reads its replies when it likes. Every cookie is answered once and as a byte array
/// would have it.
#[test]
fn every_command_is_answered_once_and_right() {
    let first: u64 = std::env::var("SPILLWAY_SEED").map_or(1, |seed| seed.parse().unwrap());
    for seed in first..first + 40 {
        println!("SPILLWAY_SEED={seed}");
        play(seed);
    }
}

/// What the model expects of one cookie.
enum Expected {
    Error(u32),
    Done,
    Data(u64, Vec<u8>),
    Status(u32),
}

fn play(seed: u64) {
    const SIZE: usize = 4 * MIB;
    let mut rng = Rng::new(seed);
    let structured = rng.chance(60);
    let contexts = structured && rng.chance(70);
    // Long reads without structured replies: each streams, each is gathered, or whichever there is room for.
    let budget = Budget::with_gathered_bytes([0, MIB, 16 * MIB][rng.below(3) as usize]);
    let mut bench = Bench::agreed_within(SIZE, structured, contexts, &budget);
    bench.disk.pace = if rng.chance(50) { Pace::Later } else { Pace::AtOnce };
    if rng.chance(50) {
        bench.shrink_socket();
    }
    bench.connection.set_disk_full(rng.chance(30));
    let mut model = pattern(SIZE, seed);
    bench.disk.bytes.clone_from(&model);
    let mut expected: HashMap<u64, Expected> = HashMap::new();
    let mut lens: HashMap<u64, usize> = HashMap::new();
    let mut answers = Answers::default();
    let part = 1 << rng.range(4..21);
    let rounds = 15;
    for round in 0..rounds {
        // Commands of one round do not overlap, so that the order of completion does not matter.
        let mut bytes = Vec::new();
        let count = rng.range(1..12);
        let lane = (SIZE as u64 / count) & !511;
        for n in 0..count {
            let cookie = rng.next();
            let most = if rng.chance(15) { lane } else { lane.min(16384) };
            let len = (rng.range(1..most / 512 + 1) * 512) as usize;
            let offset = n * lane + rng.below((lane - len as u64) / 512 + 1) * 512;
            let range = offset as usize..offset as usize + len;
            let (command, outcome) = match rng.below(12) {
                0..4 => {
                    lens.insert(cookie, len);
                    let data = model[range].to_vec();
                    (request(0, READ, cookie, offset, len as u32), Expected::Data(offset, data))
                }
                4..8 => {
                    let data = pattern(len, rng.next());
                    model[range].copy_from_slice(&data);
                    let flags = if rng.chance(30) { FUA } else { 0 };
                    (write(flags, cookie, offset, &data), Expected::Done)
                }
                8 => {
                    model[range].fill(0);
                    let (flags, command) = if rng.chance(50) { (FUA, TRIM) } else { (NO_HOLE, WRITE_ZEROES) };
                    (request(flags, command, cookie, offset, len as u32), Expected::Done)
                }
                9 => (request(0, FLUSH, cookie, 0, 0), Expected::Done),
                10 if contexts => {
                    (request(0, BLOCK_STATUS, cookie, offset, len as u32), Expected::Status(len as u32))
                }
                _ => match rng.below(4) {
                    0 => (write(0x40, cookie, offset, &vec![1; len]), Expected::Error(EINVAL)),
                    1 => (write(0, cookie, SIZE as u64, &vec![1; len]), Expected::Error(ENOSPC)),
                    2 => (request(0, READ, cookie, offset + 3, len as u32), Expected::Error(EINVAL)),
                    _ => (request(0, 33, cookie, offset, len as u32), Expected::Error(EINVAL)),
                },
            };
            bytes.extend(command);
            assert!(expected.insert(cookie, outcome).is_none());
        }
        let mut at = 0;
        let mut idle = 0;
        while !expected.is_empty() {
            // Small portions, but not millions of them.
            let end = (at + part.max(bytes.len() / 500)).min(bytes.len());
            if at < end {
                idle = 0;
            }
            at += bench.send_until_stuck(&bytes[at..end]);
            assert!(bench.ended.is_none(), "{:?}", bench.ended);
            if rng.chance(60) {
                for _ in 0..rng.below(5) {
                    bench.disk.complete_one(&mut bench.connection, &mut rng);
                }
            }
            bench.turn();
            idle += 1;
            if rng.chance(40) && bench.receive() {
                idle = 0;
            }
            assert!(
                idle < 10_000,
                "round {round}: {} answers are missing; {} requests unfinished, wants_read {}, wants_write {}, {} of {} bytes sent",
                expected.len(),
                bench.connection.unfinished(),
                bench.connection.wants_read(),
                bench.connection.wants_write(),
                at,
                bytes.len()
            );
            let taken = answers.take(&bench.received, |cookie| lens.get(&cookie).map_or(0, |len| *len));
            bench.received.drain(..taken);
            for answer in answers.done.drain(..) {
                let outcome = expected.remove(&answer.cookie).expect("an answer to nothing");
                match outcome {
                    Expected::Error(error) => assert_eq!(answer.error, error),
                    Expected::Done => assert!(answer.error == 0 && answer.chunks.is_empty()),
                    Expected::Data(offset, data) if structured => {
                        assert_eq!(answer.error, 0);
                        assert!(answer.data(offset, data.len()) == data, "round {round}: wrong data");
                    }
                    Expected::Data(_, data) => {
                        assert!(answer.chunks[0].1 == data, "round {round}: wrong data")
                    }
                    Expected::Status(len) => {
                        assert_eq!(answer.extents.iter().map(|extent| extent.0).sum::<u32>(), len);
                    }
                }
            }
        }
        assert!(bench.received.is_empty());
        assert_eq!(bench.connection.unfinished(), 0);
        assert!(bench.disk.bytes == model, "round {round}: the disk differs");
    }
    assert!(bench.connection.wants_read());
}
