//! The handshake, clause by clause of `doc/proto.md`; each test names the section it covers in
//! `docs/nbd-conformance.md`.
#![allow(clippy::unwrap_used)]

mod common;

use common::wire::*;
use common::{Bench, DESCRIPTION, NAME, Rng};
use spillway_export::ErrorKind;
use spillway_export::nbd::{Budget, Connection, Disconnect, ExportInfo, HANDSHAKE_DEADLINE};

const SIZE: usize = 1 << 20;

/// Past greeting and client flags.
fn in_handshake() -> Bench {
    let mut bench = Bench::new(SIZE);
    assert_eq!(bench.exchange(&client_flags(3)), GREETING);
    bench
}

/// The kinds of reply to one option.
fn kinds(bench: &mut Bench, number: u32, data: &[u8]) -> Vec<u32> {
    replies(bench, number, data).iter().map(|reply| reply.kind).collect()
}

fn replies(bench: &mut Bench, number: u32, data: &[u8]) -> Vec<OptionReply> {
    let replies = option_replies(&bench.exchange(&option(number, data)));
    assert!(replies.iter().all(|reply| reply.option == number));
    for reply in &replies {
        if reply.kind & 0x8000_0000 != 0 {
            assert!(!reply.data.is_empty(), "no words");
        }
    }
    replies
}

/// The handshake still goes on.
fn alive(bench: &mut Bench) {
    assert!(bench.ended.is_none(), "{:?}", bench.ended);
    assert_eq!(kinds(bench, OPT_LIST, &[]), [SERVER, ACK]);
}

/// The connection was ended for this reason.
fn ended_by(bench: &Bench, kind: ErrorKind) {
    assert!(matches!(bench.ended, Some(Disconnect::Fault(error)) if error.kind == kind), "{:?}", bench.ended);
}

fn infos(replies: &[OptionReply]) -> Vec<(u16, Vec<u8>)> {
    let infos = replies.iter().filter(|reply| reply.kind == INFO);
    infos.map(|reply| (u16_at(&reply.data, 0), reply.data[2..].to_vec())).collect()
}

#[test]
fn greeting_and_unknown_client_flags() {
    let mut bench = Bench::new(SIZE);
    assert_eq!(bench.exchange(&[]), GREETING);
    assert_eq!(bench.connection.handshake_deadline(), Some(HANDSHAKE_DEADLINE));
    for flags in [4, 1 << 31, u32::MAX] {
        let mut bench = Bench::new(SIZE);
        bench.exchange(&client_flags(flags));
        ended_by(&bench, ErrorKind::Protocol);
    }
}

#[test]
fn export_name_with_and_without_zeroes() {
    for (flags, zeroes) in [(0, 124), (1, 124), (2, 0), (3, 0)] {
        for name in ["", NAME] {
            let mut bench = Bench::new(SIZE);
            bench.exchange(&client_flags(flags));
            let reply = bench.exchange(&option(OPT_EXPORT_NAME, name.as_bytes()));
            assert_eq!(reply.len(), 10 + zeroes);
            assert_eq!(u64_at(&reply, 0), SIZE as u64);
            // DF is not set without structured replies.
            assert_eq!(u16_at(&reply, 8), 0b1001_0110_1101);
            assert!(reply[10..].iter().all(|&byte| byte == 0));
            assert!(bench.connection.handshake_deadline().is_none());
            assert_eq!(
                bench.exchange(&request(0, FLUSH, 9, 0, 0)),
                [&[0x67, 0x44, 0x66, 0x98][..], &[0; 11], &[9]].concat()
            );
        }
    }
}

#[test]
fn export_name_that_is_unknown_or_too_long_ends_the_session() {
    for name in ["another", "\0", &"x".repeat(4096), &"x".repeat(4097), &"x".repeat(40_000)] {
        let mut bench = in_handshake();
        assert_eq!(bench.exchange(&option(OPT_EXPORT_NAME, name.as_bytes())), []);
        ended_by(&bench, if name.len() > 4096 { ErrorKind::Limit } else { ErrorKind::UnknownExport });
    }
    // The length alone is enough.
    let mut bench = in_handshake();
    bench.exchange(&[&b"IHAVEOPT"[..], &[0, 0, 0, 1], &[0xff; 4]].concat());
    ended_by(&bench, ErrorKind::Limit);
}

#[test]
fn go_and_info_describe_the_export() {
    let mut bench = in_handshake();
    for name in ["", NAME] {
        for number in [OPT_INFO, OPT_INFO, OPT_GO] {
            // In any order, unknown ones ignored.
            let replies = replies(&mut bench, number, &go(name, &[3, 1, 0x7777, 2, 0]));
            assert_eq!(replies.last().unwrap(), &OptionReply { option: number, kind: ACK, data: vec![] });
            let mut infos = infos(&replies);
            infos.sort();
            let export = [&(SIZE as u64).to_be_bytes()[..], &0b1001_0110_1101u16.to_be_bytes()].concat();
            let sizes = [512u32, 4096, 32 << 20].map(u32::to_be_bytes).concat();
            assert_eq!(
                infos,
                [
                    (0, export),
                    (1, NAME.as_bytes().to_vec()),
                    (2, DESCRIPTION.as_bytes().to_vec()),
                    (3, sizes)
                ]
            );
            assert_eq!(replies.len(), 5);
            if number == OPT_GO {
                assert!(bench.connection.handshake_deadline().is_none(), "transmission");
            }
        }
        bench = in_handshake();
    }
    // Without requests: what is mandatory, and the size constraints that are enforced.
    let mut bench = in_handshake();
    let replies = replies(&mut bench, OPT_GO, &go("", &[]));
    assert_eq!(infos(&replies).iter().map(|info| info.0).collect::<Vec<_>>(), [0, 3]);
}

/// Their form is checked by what takes the replies apart.
#[test]
fn names_and_descriptions_have_any_length_there_can_be() {
    let longest = "\u{e9}".repeat(2048);
    for (name, description) in [("", ""), ("", "d"), ("n", ""), (&longest, &longest)] {
        let texts = (name.to_string(), description.to_string());
        let info = ExportInfo { size_bytes: SIZE as u64, name: texts.0, description: texts.1 };
        let mut bench = Bench::with(info);
        bench.exchange(&client_flags(3));
        let listed = &replies(&mut bench, OPT_LIST, &[])[0].data;
        assert_eq!(*listed, [string(name), description.as_bytes().to_vec()].concat());
        let mut strings = infos(&replies(&mut bench, OPT_GO, &go("", &[1, 2])));
        strings.retain(|(kind, _)| [1, 2].contains(kind));
        // A name without bytes is told, a description without bytes is none.
        let name = Some((1, name.as_bytes().to_vec()));
        let description = (!description.is_empty()).then(|| (2, description.as_bytes().to_vec()));
        assert_eq!(strings, name.into_iter().chain(description).collect::<Vec<_>>());
    }
}

#[test]
fn an_export_whose_strings_cannot_be_said_is_refused() {
    for text in ["\0", "before\0after", &"x".repeat(4097), &format!("{}\u{e9}", "x".repeat(4095))] {
        for (name, description) in [(text, ""), ("", text)] {
            let texts = (name.to_string(), description.to_string());
            let info = ExportInfo { size_bytes: SIZE as u64, name: texts.0, description: texts.1 };
            let (server, _client) = std::os::unix::net::UnixStream::pair().unwrap();
            let error = Connection::new(server.into(), info, 0, &Budget::new()).err().unwrap();
            assert_eq!(error.kind, ErrorKind::InvalidExport, "{error}");
        }
    }
}

#[test]
fn names_with_nul_are_nobodys() {
    let mut bench = in_handshake();
    assert_eq!(kinds(&mut bench, OPT_STRUCTURED_REPLY, &[]), [ACK]);
    for name in ["\0", &format!("{NAME}\0"), &format!("\0{NAME}")] {
        for number in [OPT_INFO, OPT_GO] {
            assert_eq!(kinds(&mut bench, number, &go(name, &[])), [ERR_UNKNOWN]);
        }
        for number in [OPT_LIST_META_CONTEXT, OPT_SET_META_CONTEXT] {
            let query = context_query(name, &["base:allocation"]);
            assert_eq!(kinds(&mut bench, number, &query), [ERR_UNKNOWN]);
        }
    }
    for query in ["base:allocation\0", "base:\0", "\0base:allocation"] {
        for number in [OPT_LIST_META_CONTEXT, OPT_SET_META_CONTEXT] {
            assert_eq!(kinds(&mut bench, number, &context_query(NAME, &[query])), [ACK]);
        }
    }
    alive(&mut bench);
}

#[test]
fn go_to_an_unknown_export_leaves_the_handshake_going() {
    let mut bench = in_handshake();
    for number in [OPT_INFO, OPT_GO] {
        for name in ["another", &NAME[1..], &"n".repeat(4096)] {
            assert_eq!(kinds(&mut bench, number, &go(name, &[])), [ERR_UNKNOWN]);
        }
        let mut not_utf8 = go("x", &[]);
        not_utf8[4] = 0xff;
        assert_eq!(kinds(&mut bench, number, &not_utf8), [ERR_UNKNOWN]);
    }
    alive(&mut bench);
    assert_eq!(*kinds(&mut bench, OPT_GO, &go("", &[])).last().unwrap(), ACK);
}

#[test]
fn malformed_data_is_invalid() {
    let mut bench = in_handshake();
    let whole = go(NAME, &[0, 1]);
    for number in [OPT_INFO, OPT_GO] {
        for cut in 0..whole.len() {
            assert_eq!(kinds(&mut bench, number, &whole[..cut]), [ERR_INVALID], "cut to {cut}");
        }
        let longer = [&whole[..], &[0]].concat();
        assert_eq!(kinds(&mut bench, number, &longer), [ERR_INVALID]);
        assert_eq!(kinds(&mut bench, number, &go(&"n".repeat(4097), &[])), [ERR_INVALID]);
        let mut wild = whole.clone();
        wild[..4].fill(0xff);
        assert_eq!(kinds(&mut bench, number, &wild), [ERR_INVALID]);
    }
    alive(&mut bench);
    let mut bench = in_handshake();
    assert_eq!(kinds(&mut bench, OPT_STRUCTURED_REPLY, &[]), [ACK]);
    let whole = context_query(NAME, &["base:", "base:allocation"]);
    for number in [OPT_LIST_META_CONTEXT, OPT_SET_META_CONTEXT] {
        for cut in 0..whole.len() {
            assert_eq!(kinds(&mut bench, number, &whole[..cut]), [ERR_INVALID], "cut to {cut}");
        }
        let longer = [&whole[..], &[0]].concat();
        assert_eq!(kinds(&mut bench, number, &longer), [ERR_INVALID]);
        let mut many = whole.clone();
        many[4 + NAME.len()..8 + NAME.len()].fill(0xff);
        assert_eq!(kinds(&mut bench, number, &many), [ERR_INVALID]);
        assert_eq!(kinds(&mut bench, number, &context_query("", &["allocation"])), [ERR_INVALID]);
        bench = in_handshake();
        assert_eq!(kinds(&mut bench, OPT_STRUCTURED_REPLY, &[]), [ACK]);
    }
    alive(&mut bench);
}

#[test]
fn list_names_the_export() {
    let mut bench = in_handshake();
    let answer = replies(&mut bench, OPT_LIST, &[]);
    assert_eq!(answer[0].data, [string(NAME), DESCRIPTION.as_bytes().to_vec()].concat());
    assert_eq!(answer[1], OptionReply { option: OPT_LIST, kind: ACK, data: vec![] });
    assert_eq!(kinds(&mut bench, OPT_LIST, b"x"), [ERR_INVALID]);
    alive(&mut bench);
}

#[test]
fn options_that_are_not_known_are_unsupported_with_any_data() {
    let mut bench = in_handshake();
    for number in [OPT_STARTTLS, 4, 11, 12, 0, 0x1234_5678, u32::MAX] {
        for len in [0, 1, 100, 32_768, 32_769, 65_536, 100_000] {
            assert_eq!(
                kinds(&mut bench, number, &vec![0x49; len]),
                [ERR_UNSUP],
                "option {number}, {len} bytes"
            );
            if len > 30_000 {
                // The bound on the handshake as a whole is not the subject.
                bench = in_handshake();
            }
        }
    }
    alive(&mut bench);
}

#[test]
fn options_that_are_too_long_are_refused_and_skipped() {
    for number in
        [OPT_LIST, OPT_INFO, OPT_GO, OPT_STRUCTURED_REPLY, OPT_LIST_META_CONTEXT, OPT_SET_META_CONTEXT]
    {
        let mut bench = in_handshake();
        assert_eq!(kinds(&mut bench, number, &vec![0; 32_769]), [ERR_TOO_BIG]);
        assert_eq!(kinds(&mut bench, number, &vec![0; 500_000]), [ERR_TOO_BIG]);
        alive(&mut bench);
    }
}

#[test]
fn abort_is_acknowledged_and_ends_the_session() {
    for data in [&[][..], b"so long", &[7; 50_000]] {
        let mut bench = in_handshake();
        assert_eq!(kinds(&mut bench, OPT_ABORT, data), [ACK]);
        assert!(matches!(bench.ended, Some(Disconnect::Finished)), "{:?}", bench.ended);
    }
    // What follows is not looked at.
    let mut bench = in_handshake();
    let bytes = [option(OPT_ABORT, &[]), option(OPT_LIST, &[]), vec![0xff; 100]].concat();
    assert_eq!(option_replies(&bench.exchange(&bytes)).len(), 1);
    assert!(matches!(bench.ended, Some(Disconnect::Finished)));
    // A client that does not wait for the answer.
    let mut bench = in_handshake();
    std::io::Write::write_all(&mut bench.client, &option(OPT_ABORT, &[])).unwrap();
    bench.client.shutdown(std::net::Shutdown::Both).unwrap();
    bench.turn();
    bench.turn();
    assert!(bench.ended.as_ref().is_some_and(Disconnect::is_ordinary), "{:?}", bench.ended);
}

#[test]
fn structured_replies_are_agreed_on() {
    let mut bench = in_handshake();
    assert_eq!(kinds(&mut bench, OPT_STRUCTURED_REPLY, b"x"), [ERR_INVALID]);
    assert_eq!(kinds(&mut bench, OPT_LIST_META_CONTEXT, &context_query("", &[])), [ERR_INVALID]);
    assert_eq!(kinds(&mut bench, OPT_SET_META_CONTEXT, &context_query("", &[])), [ERR_INVALID]);
    assert_eq!(kinds(&mut bench, OPT_STRUCTURED_REPLY, &[]), [ACK]);
    assert_eq!(kinds(&mut bench, OPT_STRUCTURED_REPLY, &[]), [ACK]);
    let replies = replies(&mut bench, OPT_GO, &go("", &[]));
    let export = infos(&replies).remove(0);
    assert_eq!(u16_at(&export.1, 8), 0b1001_1110_1101, "with DF");
}

#[test]
fn contexts_are_listed_and_set() {
    let context = |id: u32| [&id.to_be_bytes()[..], b"base:allocation"].concat();
    let listed: [(&[&str], bool); 8] = [
        (&[], true),
        (&["base:"], true),
        (&["base:allocation"], true),
        (&["base:allocation", "base:", "base:allocation"], true),
        (&["base:other", "x-mine:", "qemu:dirty-bitmap:b"], false),
        (&["x-mine:base:allocation"], false),
        (&["base:Allocation"], false),
        (&["x-mine:all", "base:allocation"], true),
    ];
    let mut bench = in_handshake();
    assert_eq!(kinds(&mut bench, OPT_STRUCTURED_REPLY, &[]), [ACK]);
    for (queries, found) in listed {
        let answer = replies(&mut bench, OPT_LIST_META_CONTEXT, &context_query("", queries));
        assert_eq!(answer.len(), 1 + usize::from(found), "{queries:?}");
        if found {
            assert_eq!((answer[0].kind, &answer[0].data), (META_CONTEXT, &context(0)));
        }
        assert_eq!(answer.last().unwrap().kind, ACK);
        // Setting has no wildcards.
        let found = queries.contains(&"base:allocation");
        let answer = replies(&mut bench, OPT_SET_META_CONTEXT, &context_query(NAME, queries));
        assert_eq!(answer.len(), 1 + usize::from(found), "{queries:?}");
        if found {
            assert_eq!((answer[0].kind, &answer[0].data), (META_CONTEXT, &context(1)));
        }
    }
    for number in [OPT_LIST_META_CONTEXT, OPT_SET_META_CONTEXT] {
        assert_eq!(kinds(&mut bench, number, &context_query("nobody", &["base:allocation"])), [ERR_UNKNOWN]);
    }
}

#[test]
fn a_failed_selection_replaces_the_one_before() {
    for failing in [
        context_query("nobody", &["base:allocation"]),
        context_query("", &[]),
        context_query("", &["base:"]),
        vec![0; 3],
        vec![0; 40_000],
    ] {
        let mut bench = in_handshake();
        assert_eq!(kinds(&mut bench, OPT_STRUCTURED_REPLY, &[]), [ACK]);
        let good = context_query("", &["base:allocation"]);
        assert_eq!(kinds(&mut bench, OPT_SET_META_CONTEXT, &good), [META_CONTEXT, ACK]);
        kinds(&mut bench, OPT_SET_META_CONTEXT, &failing);
        assert_eq!(*kinds(&mut bench, OPT_GO, &go("", &[])).last().unwrap(), ACK);
        assert_eq!(bench.ask(&request(0, BLOCK_STATUS, 1, 0, 4096)).error, 22);
    }
}

#[test]
fn a_handshake_is_bounded_in_number_and_bytes() {
    let mut bench = in_handshake();
    for _ in 0..256 {
        assert_eq!(kinds(&mut bench, OPT_LIST, &[]), [SERVER, ACK]);
    }
    bench.exchange(&option(OPT_LIST, &[]));
    ended_by(&bench, ErrorKind::Limit);

    let mut bench = in_handshake();
    for _ in 0..32 {
        assert_eq!(kinds(&mut bench, 99, &[0; 32 << 10]), [ERR_UNSUP]);
    }
    bench.exchange(&option(99, &[0]));
    ended_by(&bench, ErrorKind::Limit);

    let mut bench = in_handshake();
    bench.exchange(&[&b"IHAVEOPT"[..], &[0, 0, 0, 9], &[0xff; 4]].concat());
    ended_by(&bench, ErrorKind::Limit);
}

#[test]
fn a_client_that_reads_no_replies_is_stopped_and_goes_on_later() {
    // Answers that are longer than the questions: the socket fills, then the queue, then input stops.
    let (name, description) = ("n".repeat(4096), "d".repeat(4096));
    let mut bench = Bench::with(ExportInfo { size_bytes: SIZE as u64, name, description });
    bench.shrink_socket();
    assert_eq!(bench.exchange(&client_flags(3)), GREETING);
    let questions = option(OPT_INFO, &go("", &[1, 2])).repeat(250);
    for _ in 0..2 {
        assert_eq!(bench.send_until_stuck(&questions[..questions.len() / 2]), questions.len() / 2);
        assert!(!bench.connection.wants_read() && bench.connection.wants_write());
        bench.settle();
        assert!(bench.connection.wants_read() && !bench.connection.wants_write());
        assert_eq!(option_replies(&bench.received).iter().filter(|reply| reply.kind == ACK).count(), 125);
        bench.received.clear();
    }
    assert!(bench.ended.is_none());
}

#[test]
fn an_option_without_its_magic_number_ends_the_session() {
    for at in 0..8 {
        let mut bench = in_handshake();
        let mut bytes = option(OPT_LIST, &[]);
        bytes[at] ^= 1;
        bench.exchange(&bytes);
        ended_by(&bench, ErrorKind::Protocol);
    }
}

/// Everything that a client may say, in one stream: byte by byte, in random portions and at once it has the same
/// answer.
#[test]
fn the_portions_in_which_bytes_arrive_do_not_matter() {
    let data: Vec<u8> = (0..20_000u32).map(|n| (n % 251) as u8).collect();
    let session = [
        client_flags(3),
        option(OPT_STARTTLS, &[]),
        option(77, &[1; 33_000]),
        option(OPT_LIST, &[]),
        option(OPT_LIST, b"x"),
        option(OPT_STRUCTURED_REPLY, &[]),
        option(OPT_LIST_META_CONTEXT, &context_query(NAME, &["base:"])),
        option(OPT_SET_META_CONTEXT, &context_query("", &["base:allocation"])),
        option(OPT_INFO, &go("nobody", &[1])),
        option(OPT_INFO, &go(NAME, &[1, 2])),
        option(OPT_GO, &go("", &[3])),
        write(FUA, 1, 4096, &data[..8192]),
        request(0, READ, 2, 0, 16384),
        write(0, 3, SIZE as u64 - 512, &data[..1024]),
        write(8, 4, 0, &data[..512]),
        write(0, 5, 1024, &data[..19_968]),
        request(DF, READ, 6, 1024, 19_968),
        request(0, FLUSH, 7, 0, 0),
        request(FUA, TRIM, 8, 8192, 4096),
        request(NO_HOLE, WRITE_ZEROES, 9, 0, 4096),
        request(0, BLOCK_STATUS, 10, 0, SIZE as u32),
        request(0, 99, 11, 0, 0),
        request(0, READ, 12, 0, SIZE as u32),
        request(0, DISC, 13, 0, 0),
    ]
    .concat();
    let play = |part: &mut dyn FnMut() -> usize| {
        let mut bench = Bench::new(SIZE);
        let mut at = 0;
        while at < session.len() {
            let end = (at + part()).min(session.len());
            bench.send(&session[at..end]);
            at = end;
        }
        bench.settle();
        assert!(matches!(bench.ended, Some(Disconnect::Finished)), "{:?}", bench.ended);
        bench.received
    };
    let whole = play(&mut || usize::MAX >> 1);
    assert!(whole.len() > SIZE);
    assert!(play(&mut || 1) == whole, "byte by byte");
    for seed in 0..20 {
        let mut rng = Rng::new(seed);
        let most = 1 << (1 + seed % 17);
        assert!(play(&mut || 1 + rng.below(most) as usize) == whole, "seed {seed}");
    }
}

/// Random bytes, and valid sessions with flipped bits: no panic, no unbounded growth, and always an end or a wait.
#[test]
fn garbage_ends_or_waits() {
    let seed = std::env::var("SPILLWAY_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(1u64);
    println!("SPILLWAY_SEED={seed}");
    let mut rng = Rng::new(seed);
    let valid = [
        client_flags(3),
        option(OPT_STRUCTURED_REPLY, &[]),
        option(OPT_SET_META_CONTEXT, &context_query("", &["base:allocation"])),
        option(OPT_INFO, &go(NAME, &[1, 2, 3])),
        option(OPT_GO, &go("", &[])),
        write(0, 1, 0, &[5; 4096]),
        request(0, READ, 2, 0, 8192),
        request(0, BLOCK_STATUS, 3, 0, 65536),
        request(0, TRIM, 4, 0, 65536),
        write(FUA, 5, 8192, &[6; 2048]),
        request(0, FLUSH, 6, 0, 0),
    ]
    .concat();
    let mut ended = 0;
    for _ in 0..3000 {
        let mut bytes = valid.clone();
        if rng.chance(10) {
            bytes.iter_mut().for_each(|byte| *byte = rng.next() as u8);
        }
        for _ in 0..rng.range(1..8) {
            let at = rng.below(bytes.len() as u64) as usize;
            match rng.below(4) {
                0 => bytes[at] = rng.next() as u8,
                1 => bytes[at] ^= 1 << rng.below(8),
                2 => bytes.truncate(at.max(4)),
                _ => {
                    let from = rng.below(bytes.len() as u64) as usize;
                    let part = bytes[from..(from + 40).min(bytes.len())].to_vec();
                    bytes.splice(at..at, part);
                }
            }
        }
        let mut bench = Bench::new(SIZE);
        for part in bytes.chunks(rng.range(1..6000) as usize) {
            bench.send(part);
        }
        bench.settle();
        if bench.ended.is_none() {
            assert_eq!(bench.connection.unfinished(), 0);
            assert!(!bench.connection.wants_write());
            assert!(bench.connection.wants_read());
        }
        ended += usize::from(bench.ended.is_some());
    }
    assert!(ended > 300, "garbage was noticed only {ended} times");
}

#[test]
fn the_document_names_tests_that_are_there() {
    let here = std::path::Path::new(env!("CARGO_MANIFEST_DIR"));
    let document = std::fs::read_to_string(here.join("../../docs/nbd-conformance.md")).unwrap();
    let tests: String = ["nbd_handshake", "nbd_transmission", "nbd_memory", "nbd_tools"]
        .map(|name| std::fs::read_to_string(here.join("tests").join(name).with_extension("rs")).unwrap())
        .concat();
    let quoted = document.split('`').skip(1).step_by(2);
    let names: Vec<_> = quoted
        .filter(|name| {
            name.matches('_').count() > 1
                && name.bytes().all(|b| matches!(b, b'a'..=b'z' | b'_' | b'0'..=b'9'))
        })
        .collect();
    assert!(names.len() > 50);
    for name in names {
        assert!(tests.contains(&format!("fn {name}()")), "{name} is not a test");
    }
}
