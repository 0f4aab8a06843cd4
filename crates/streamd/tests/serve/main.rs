//! `spillway-streamd serve` as workers use it: the program itself, a registry on a web server that this test can slow down, stop
//! and falsify, and clients that ask for chunks.
#![allow(clippy::unwrap_used)]

mod changes;
mod client;
mod far;
mod members;
mod peers;
mod scene;
mod seeds;
mod web;
mod wire;

use client::{Client, Got};
use scene::{CHUNKS, RECORDS, Registry, Streamd, blocks_bytes, chunk_len};
use spillway_image::asks::{MOST_ASKED, ask};
use spillway_registry::serve::{ControlReply, ControlRequest, Fill};
use spillway_testkit::Rng;
use spillway_testkit::process::wait_until;
use std::collections::HashSet;
use std::fs;
use std::os::fd::AsFd;
use std::thread;
use std::time::{Duration, Instant};
use web::{Fault, Web};

const MIB: u64 = 1 << 20;

#[test]
fn each_chunk_is_fetched_once_however_many_ask() {
    let registry = Registry::new(&[1]);
    let streamd = Streamd::start(&registry, 1 << 30);
    thread::scope(|scope| {
        for n in 0..8 {
            let (registry, streamd) = (&registry, &streamd);
            scope.spawn(move || {
                let mut client = Client::open(&streamd.socket, &registry.images[0].root);
                // Each in another order, all at once.
                let chunks: Vec<u32> = (0..CHUNKS).map(|chunk| (chunk * 7 + n) % CHUNKS).collect();
                chunks.iter().for_each(|chunk| client.ask(*chunk));
                for _ in &chunks {
                    let (chunk, got) = client.answer();
                    assert!(matches!(got, Got::Resident), "{got:?}");
                    assert!(client.has(chunk) && client.read(chunk) == registry.images[0].chunk(chunk));
                }
            });
        }
    });
    let gets = registry.web.gets("/chunks/");
    assert!(gets.values().all(|count| *count == 1), "{gets:?}");
    assert_eq!(gets.len(), registry.images[0].data_chunks() as usize, "zeroes are not fetched");
}

#[test]
fn a_store_that_is_away_holds_up_nobody_but_who_needs_it() {
    let registry = Registry::new(&[1]);
    let streamd = Streamd::start(&registry, 1 << 30);
    let mut client = Client::open(&streamd.socket, &registry.images[0].root);
    client.get(0);
    registry.web.set(Fault::Hangs);
    client.ask(1);
    let begun = Instant::now();
    let mut other = Client::open(&streamd.socket, &registry.images[0].root);
    assert!(matches!(other.get(0), Got::Resident) && begun.elapsed() < Duration::from_secs(5));
    assert!(other.has(0) && !other.has(1));
    registry.web.set(Fault::Refuses);
    thread::sleep(Duration::from_secs(1));
    registry.web.set(Fault::None);
    // No error, however long it took.
    assert!(matches!(client.answer(), (1, Got::Resident)));
    assert!(client.read(1) == registry.images[0].chunk(1));
}

#[test]
fn a_store_that_is_slow_with_chunks_alone_is_waited_for() {
    let registry = Registry::new(&[1]);
    let streamd = Streamd::start(&registry, 1 << 30);
    registry.web.set(Fault::Slow);
    let mut client = Client::open(&streamd.socket, &registry.images[0].root);
    client.ask(0);
    let got = || client.has(0).then_some(());
    assert!(wait_until(Duration::from_secs(60), got).is_some(), "each request was broken off");
    assert!(matches!(client.answer(), (0, Got::Resident)) && client.read(0) == registry.images[0].chunk(0));
}

/// Unix sockets that a process has open.
fn unix_sockets(pid: u32) -> usize {
    let all = fs::read_to_string("/proc/net/unix").unwrap();
    let inodes: HashSet<_> = all.lines().filter_map(|line| line.split_whitespace().nth(6)).collect();
    let open = fs::read_dir(format!("/proc/{pid}/fd")).unwrap().flatten();
    let links = open.filter_map(|fd| fs::read_link(fd.path()).ok()?.to_str().map(String::from));
    links
        .filter(|link| {
            let inode = link.strip_prefix("socket:[").and_then(|link| link.strip_suffix(']'));
            inode.is_some_and(|inode| inodes.contains(inode))
        })
        .count()
}

#[test]
fn who_goes_is_forgotten_although_the_store_is_away() {
    let registry = Registry::new(&[1]);
    let streamd = Streamd::start(&registry, 1 << 30);
    let before = unix_sockets(streamd.id());
    assert!(before >= 2, "it listens on two: {before}");
    registry.web.set(Fault::Hangs);
    let mut clients: Vec<_> =
        (0..8).map(|_| Client::open(&streamd.socket, &registry.images[0].root)).collect();
    clients.iter_mut().for_each(|client| (0..CHUNKS).for_each(|chunk| client.ask(chunk)));
    assert!(unix_sockets(streamd.id()) >= before + 8);
    let data = u64::from(registry.images[0].data_chunks());
    let begun = || (streamd.figures().flights == data).then_some(());
    assert!(wait_until(Duration::from_secs(60), begun).is_some(), "{:?}", streamd.figures());
    drop(clients);
    let forgotten =
        wait_until(Duration::from_secs(5), || (unix_sockets(streamd.id()) <= before).then_some(()));
    assert!(forgotten.is_some(), "{} of {before}", unix_sockets(streamd.id()));
    // Soon nothing is brought any more that nobody waits for.
    let ended = || (streamd.figures().flights == 0).then_some(());
    assert!(wait_until(Duration::from_secs(60), ended).is_some(), "{:?}", streamd.figures());
    // What they asked for comes to who asks again.
    registry.web.set(Fault::None);
    let mut client = Client::open(&streamd.socket, &registry.images[0].root);
    assert!(matches!(client.get(1), Got::Resident));
}

#[test]
fn who_stays_gets_what_others_have_asked_for_before() {
    let registry = Registry::new(&[1, 2]);
    let streamd = Streamd::start(&registry, 1 << 30);
    registry.web.set(Fault::Hangs);
    let open = || Client::open(&streamd.socket, &registry.images[0].root);
    let (mut first, mut second) = (open(), open());
    first.ask(0);
    let asked = || (streamd.figures().flights == 1).then_some(());
    assert!(wait_until(Duration::from_secs(60), asked).is_some());
    second.ask(0);
    // What fills an image waits, too.
    assert_eq!(streamd.serve(&registry, 1, Fill::Chunks(vec![0])), ControlReply::Done);
    thread::sleep(Duration::from_millis(500));
    drop(first);
    // Longer than a flight goes on that nobody waits for.
    thread::sleep(Duration::from_secs(8));
    registry.web.set(Fault::None);
    assert!(matches!(second.answer(), (0, Got::Resident)));
    assert!(second.read(0) == registry.images[0].chunk(0));
    let filled = || (streamd.image(&registry, 1).unfilled_chunks == 0).then_some(());
    assert!(wait_until(Duration::from_secs(30), filled).is_some(), "sooner than it is tried again");
}

#[test]
fn who_asks_for_too_much_at_once_is_let_go() {
    let registry = Registry::new(&[1]);
    let streamd = Streamd::start(&registry, 1 << 30);
    registry.web.set(Fault::Hangs);
    let mut client = Client::open(&streamd.socket, &registry.images[0].root);
    let chunk = (0..CHUNKS).find(|chunk| !client.has(*chunk)).unwrap();
    for _ in 0..MOST_ASKED {
        client.ask(chunk);
    }
    let mut greedy = Client::open(&streamd.socket, &registry.images[0].root);
    // The connection may be closed before all questions are sent.
    (0..4 * MOST_ASKED).for_each(|_| _ = greedy.try_ask(chunk));
    assert!(greedy.try_answer().is_none());
    registry.web.set(Fault::None);
    for _ in 0..MOST_ASKED {
        assert!(matches!(client.answer(), (_, Got::Resident)), "it has asked for what it may");
    }
}

#[test]
fn nothing_wrong_is_ever_handed_out() {
    let registry = Registry::new(&[1]);
    let mut random = Rng::new(23);
    for round in 0..6 {
        let streamd = Streamd::start(&registry, 1 << 30);
        let mut client = Client::open(&streamd.socket, &registry.images[0].root);
        let fault = [Fault::Flips, Fault::Cuts, Fault::Sometimes][round % 3];
        registry.web.set(fault);
        (0..CHUNKS).for_each(|chunk| client.ask(chunk));
        // Bodies that are cut are asked for again without end, as of a store that is away.
        let is_cut = fault == Fault::Cuts;
        for n in 0..CHUNKS {
            if n == registry.images[0].zero_chunks() && is_cut {
                thread::sleep(Duration::from_secs(1));
                let right = |chunk: u32| client.read(chunk) == registry.images[0].chunk(chunk);
                assert!((0..CHUNKS).filter(|chunk| client.has(*chunk)).all(right));
                registry.web.set(Fault::None);
            }
            match client.answer() {
                (chunk, Got::Resident) => {
                    assert!(client.read(chunk) == registry.images[0].chunk(chunk), "{fault:?} {chunk}");
                }
                (chunk, Got::Damaged) => {
                    assert!(!client.has(chunk) && fault != Fault::Cuts, "{fault:?} {chunk}")
                }
                (chunk, Got::Passed(_)) => panic!("there is space for {chunk}"),
            }
        }
        registry.web.set(Fault::None);
        for chunk in 0..CHUNKS {
            assert!(matches!(client.get(chunk), Got::Resident), "it is asked for again: {chunk}");
            assert!(client.read(chunk) == registry.images[0].chunk(chunk));
        }
        drop((client, streamd));
        // The files of the cache, damaged while nobody looks.
        scene::damage(&registry.cache(), &mut random);
    }
}

#[test]
fn it_may_be_killed_at_any_time() {
    let kills = std::env::var("SPILLWAY_KILLS").map_or(20, |kills| kills.parse().unwrap());
    let mut registry = Registry::new(&[1]);
    let mut random = Rng::new(5);
    for _ in 0..kills {
        // A server of its own: requests of one that was killed are not counted.
        registry.web = Web::new(&registry.shared());
        let mut streamd = Streamd::start(&registry, 1 << 30);
        let mut client = Client::open(&streamd.socket, &registry.images[0].root);
        (0..CHUNKS).for_each(|chunk| client.ask(chunk));
        let most = random.below(u64::from(CHUNKS));
        for _ in 0..most {
            let Some((chunk, got)) = client.try_answer() else { break };
            assert!(matches!(got, Got::Resident) && client.read(chunk) == registry.images[0].chunk(chunk));
        }
        streamd.kill();
        let gets = registry.web.gets("/chunks/");
        assert!(gets.values().all(|count| *count == 1), "{gets:?}");
        // What was told stays readable for who has it.
        for chunk in (0..CHUNKS).filter(|chunk| client.has(*chunk)) {
            assert!(client.read(chunk) == registry.images[0].chunk(chunk), "{chunk}");
        }
        if random.below(3) == 0 {
            drop(client);
            fs::remove_dir_all(registry.cache()).unwrap();
            fs::create_dir(registry.cache()).unwrap();
        }
    }
    // Nothing is fetched twice that an earlier one had kept.
    let streamd = Streamd::start(&registry, 1 << 30);
    let mut client = Client::open(&streamd.socket, &registry.images[0].root);
    (0..CHUNKS).for_each(|chunk| _ = client.get(chunk));
    drop((client, streamd));
    registry.web.forget();
    let streamd = Streamd::start(&registry, 1 << 30);
    let mut client = Client::open(&streamd.socket, &registry.images[0].root);
    for chunk in 0..CHUNKS {
        assert!(
            matches!(client.get(chunk), Got::Resident)
                && client.read(chunk) == registry.images[0].chunk(chunk)
        );
    }
    assert_eq!(registry.web.gets("/").len(), 0, "the store is not needed");
}

#[test]
fn it_may_be_killed_while_chunks_are_removed() {
    let kills = std::env::var("SPILLWAY_KILLS").map_or(20, |kills| kills.parse().unwrap());
    let registry = Registry::new(&[1, 2]);
    let (budget, mut random, mut evicted) = (4 * MIB, Rng::new(7), 0);
    for kill in 0..kills {
        let mut streamd = Streamd::start(&registry, budget);
        let counted = streamd.figures().used_bytes;
        assert!(
            counted <= budget && blocks_bytes(&registry.cache()) <= budget + RECORDS,
            "{kill}: {counted}"
        );
        let most = random.below(3 * u64::from(CHUNKS));
        for n in 0..most {
            // Only one image is used at a time, and takes the space of the other.
            let image = ((n / 4 + kill) % 2) as usize;
            let mut client = Client::open(&streamd.socket, &registry.images[image].root);
            let chunk = random.below(u64::from(CHUNKS)) as u32;
            let bytes = match client.get(chunk) {
                Got::Resident => client.read(chunk),
                Got::Passed(bytes) => bytes,
                Got::Damaged => panic!("{chunk}"),
            };
            assert!(bytes == registry.images[image].chunk(chunk), "{kill}: {chunk} of {image}");
            let used = blocks_bytes(&registry.cache());
            assert!(used <= budget + RECORDS, "{kill}: {used}");
        }
        evicted += streamd.figures().evicted_chunks;
        // In the middle of what it does for these.
        let other = (most / 4 + kill + 1) % 2;
        let mut client = Client::open(&streamd.socket, &registry.images[other as usize].root);
        (0..CHUNKS).for_each(|chunk| client.ask(chunk));
        thread::sleep(Duration::from_millis(random.below(12)));
        streamd.kill();
    }
    assert!(evicted > kills, "{evicted} were removed");
}

#[test]
fn the_cache_is_never_larger_than_its_budget() {
    let registry = Registry::new(&[1, 2, 3]);
    let budget = 6 * MIB;
    let streamd = Streamd::start(&registry, budget);
    let within = || {
        let used = blocks_bytes(&registry.cache());
        assert!(used <= budget + RECORDS, "{used} of {budget}");
    };
    let mut first = Client::open(&streamd.socket, &registry.images[0].root);
    for chunk in 0..4 {
        assert!(matches!(first.get(chunk), Got::Resident));
        within();
    }
    // Another image has the rest; then what it lacks is passed on, since both are used.
    let mut second = Client::open(&streamd.socket, &registry.images[1].root);
    let mut passed = 0;
    for chunk in 0..CHUNKS {
        match second.get(chunk) {
            Got::Resident => assert!(second.read(chunk) == registry.images[1].chunk(chunk)),
            Got::Passed(bytes) => {
                passed += 1;
                assert!(bytes == registry.images[1].chunk(chunk) && !second.has(chunk));
            }
            Got::Damaged => panic!("{chunk}"),
        }
        within();
    }
    assert!(passed > 0);
    assert!((0..4).all(|chunk| first.has(chunk) && first.read(chunk) == registry.images[0].chunk(chunk)));
    // Nobody uses the first any more: its space is the third's.
    drop(first);
    let mut third = Client::open(&streamd.socket, &registry.images[2].root);
    let data = (0..CHUNKS).filter(|chunk| registry.images[2].chunk(*chunk).iter().any(|byte| *byte != 0));
    for chunk in data.take(3) {
        assert!(matches!(third.get(chunk), Got::Resident), "{chunk}");
        within();
    }
    // The first is read again, and its old place does not count.
    let mut first = Client::open(&streamd.socket, &registry.images[0].root);
    for chunk in 0..CHUNKS {
        let bytes = match first.get(chunk) {
            Got::Resident => first.read(chunk),
            Got::Passed(bytes) => bytes,
            Got::Damaged => panic!("{chunk}"),
        };
        assert!(bytes == registry.images[0].chunk(chunk), "{chunk}");
        within();
    }
    assert_eq!(chunk_len(CHUNKS - 1), 512);
}

#[test]
fn who_says_nonsense_is_let_go() {
    let registry = Registry::new(&[1]);
    let streamd = Streamd::start(&registry, 1 << 30);
    for packet in [&b"open"[..], b"nonsense", &[0; 64], b"open0123456789abcdef0123456789abcdef"] {
        let client = Client::connect(&streamd.socket);
        assert_eq!(client.say(packet), b"unknown");
    }
    for chunk in [CHUNKS, u32::MAX] {
        assert_eq!(Client::open(&streamd.socket, &registry.images[0].root).say(&ask(chunk)), b"");
    }
    assert_eq!(Client::open(&streamd.socket, &registry.images[0].root).say(&[0; 5]), b"");
    let mut client = Client::open(&streamd.socket, &registry.images[0].root);
    assert!(matches!(client.get(0), Got::Resident));
}

#[test]
fn the_daemon_says_what_is_served_and_what_goes() {
    let registry = Registry::new(&[1, 2]);
    let gone =
        ["1".repeat(64), format!("{}.0.removed", "2".repeat(64))].map(|name| registry.cache().join(name));
    // A folder that is not this program's, and a file.
    let strange = registry.cache().join("backups");
    gone.iter().chain([&strange]).for_each(|folder| fs::create_dir(folder).unwrap());
    fs::write(strange.join("file"), "x").unwrap();
    let streamd = Streamd::start_unswept(&registry, 1 << 30);
    let control = &streamd.control;
    // Before all images are named, nothing is kept.
    let mut client = Client::open(&streamd.socket, &registry.images[0].root);
    assert!(matches!(client.get(0), Got::Passed(bytes) if bytes == registry.images[0].chunk(0)));
    assert_eq!(control.control(&ControlRequest::Sweep { others: vec![] }, &[]), ControlReply::Done);
    assert!(gone.iter().all(|folder| !folder.exists()) && strange.join("file").exists());
    fs::remove_dir_all(strange).unwrap();
    assert!(matches!(client.get(0), Got::Resident) && matches!(client.get(1), Got::Resident));

    let digest = |n: usize| registry.images[n].digest();
    let figures = |n: usize| streamd.image(&registry, n);
    let zeroes = u64::from(registry.images[0].zero_chunks());
    assert_eq!((figures(0).chunks, figures(0).present_chunks), (u64::from(CHUNKS), 2 + zeroes));
    assert_eq!(figures(0).present_bytes, 2 * MIB);
    let ControlReply::Figures(all) = control.control(&ControlRequest::Figures, &[]) else { panic!() };
    assert_eq!((all.used_bytes, all.store_chunks, all.passed_chunks, all.wrong_chunks), (2 * MIB, 3, 1, 0));
    assert!(all.received_bytes > 0 && all.store_bytes == 3 * MIB && all.flights == 0);

    // What is used stays; what is not goes, with its space.
    let forget = ControlRequest::Forget { digest: digest(0) };
    assert!(matches!(control.control(&forget, &[]), ControlReply::Refused(why) if why.contains("uses it")));
    assert!(matches!(client.get(0), Got::Resident));
    drop(client);
    assert_eq!(control.control(&forget, &[]), ControlReply::Done);
    assert_eq!(blocks_bytes(&registry.cache()), 0);
    assert_eq!(
        Client::connect(&streamd.socket).say(&spillway_image::asks::open(&registry.images[0].root)),
        b"unknown"
    );
    assert!(matches!(Client::open(&streamd.socket, &registry.images[1].root).get(0), Got::Resident));
    // Nonsense is refused, and changes nothing.
    let nonsense = |size_bytes| ControlRequest::Serve {
        digest: digest(0),
        size_bytes,
        place: scene::place_of(&registry),
        fill: Fill::Nothing,
        dry_run: false,
    };
    for (request, file) in [
        (ControlRequest::Image { digest: "sha256:x".into() }, None),
        (ControlRequest::Image { digest: digest(0) }, None),
        (nonsense(MIB), None),
        (nonsense(u64::MAX), Some(tempfile::tempfile().unwrap())),
        (nonsense(MIB), Some(tempfile::tempfile().unwrap())),
    ] {
        let fds: Vec<_> = file.iter().map(AsFd::as_fd).collect();
        assert!(matches!(control.control(&request, &fds), ControlReply::Refused(_)), "{request:?}");
    }
}

#[test]
fn what_a_store_refuses_keeps_no_other_chunk_of_a_whole_image_from_coming() {
    let registry = Registry::new(&[1]);
    let digest = |chunk| spillway_image::digests::of_chunk(registry.images[0].chunk(chunk));
    let path = |chunk| format!("/{}", spillway_registry::chunk_key(&digest(chunk)));
    registry.web.refuse([0, 1, 2].map(path));
    let streamd = Streamd::start(&registry, 1 << 30);
    // Disks wait for them, too.
    let mut client = Client::open(&streamd.socket, &registry.images[0].root);
    (0..3).for_each(|chunk| client.ask(chunk));
    assert_eq!(streamd.serve(&registry, 0, Fill::All), ControlReply::Done);
    let others = || (streamd.image(&registry, 0).unfilled_chunks == 3).then_some(());
    assert!(wait_until(Duration::from_secs(120), others).is_some(), "{:?}", streamd.image(&registry, 0));
    registry.web.refuse([]);
    let whole = || streamd.image(&registry, 0).is_whole.then_some(());
    assert!(wait_until(Duration::from_secs(120), whole).is_some(), "{:?}", streamd.image(&registry, 0));
}

#[test]
fn chunks_are_brought_before_anybody_asks_and_stay() {
    let registry = Registry::new(&[1, 2, 3]);
    let mut streamd = Streamd::start(&registry, 18 * MIB);
    let until =
        |streamd: &Streamd, n: usize, what: &dyn Fn(spillway_registry::serve::ImageFigures) -> bool| {
            let deadline = Instant::now() + Duration::from_secs(30);
            while !what(streamd.image(&registry, n)) {
                assert!(Instant::now() < deadline, "{:?}", streamd.image(&registry, n));
                thread::sleep(Duration::from_millis(5));
            }
        };
    // A boot set, in its order; what is no chunk is none.
    let boot = Fill::Chunks(vec![7, 0, 2, 4_000_000]);
    assert_eq!(streamd.serve(&registry, 0, boot.clone()), ControlReply::Done);
    until(&streamd, 0, &|figures| figures.unfilled_chunks == 0);
    let of = |chunks: &[u32]| {
        chunks.iter().map(|chunk| registry.images[0].chunk(*chunk).len() as u64).sum::<u64>()
    };
    assert_eq!(streamd.image(&registry, 0).present_bytes, of(&[7, 0, 2]));
    // A whole image.
    assert_eq!(streamd.serve(&registry, 1, Fill::All), ControlReply::Done);
    until(&streamd, 1, &|figures| figures.is_whole);
    let (whole, boot_bytes) = (streamd.image(&registry, 1), of(&[7, 0, 2]));
    assert_eq!((whole.present_chunks, whole.unfilled_chunks), (u64::from(CHUNKS), 0));
    // More than there is space for is refused, with the numbers.
    // The last chunk is short, and takes a block.
    let needs = whole.present_bytes.next_multiple_of(4096);
    match streamd.serve(&registry, 2, Fill::All) {
        ControlReply::Refused(why) => {
            assert!(why.contains(&format!("take {needs} bytes")) && why.contains("18874368"), "{why}");
            assert!(why.contains(&format!("images {},", needs + boot_bytes)), "{why}");
        }
        other => panic!("{other:?}"),
    }
    // A third image has what is left, and takes nothing of these.
    let mut third = Client::open(&streamd.socket, &registry.images[2].root);
    let mut passed = 0;
    for chunk in 0..CHUNKS {
        match third.get(chunk) {
            Got::Resident => assert!(third.read(chunk) == registry.images[2].chunk(chunk)),
            Got::Passed(bytes) => {
                passed += 1;
                assert!(bytes == registry.images[2].chunk(chunk));
            }
            Got::Damaged => panic!("{chunk}"),
        }
    }
    assert!(passed > 0 && blocks_bytes(&registry.cache()) <= 18 * MIB + RECORDS);
    assert_eq!(streamd.image(&registry, 1).present_bytes, whole.present_bytes);
    assert_eq!(streamd.image(&registry, 0).present_bytes, boot_bytes);
    // From now on the store is not needed for it, whatever dies.
    drop(third);
    streamd.kill();
    registry.web.set(Fault::Refuses);
    let streamd = Streamd::start(&registry, 18 * MIB);
    assert_eq!(streamd.serve(&registry, 1, Fill::All), ControlReply::Done);
    until(&streamd, 1, &|figures| figures.is_whole);
    let mut client = Client::open(&streamd.socket, &registry.images[1].root);
    for chunk in 0..CHUNKS {
        assert!(matches!(client.get(chunk), Got::Resident));
        assert!(client.read(chunk) == registry.images[1].chunk(chunk));
    }
}
