//! A proxy as a plain client sees it: each fault, each figure, and what it leaves alone.

use super::*;
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::{Duration, Instant};

const LONG: Duration = Duration::from_secs(20);

/// What a client got.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Got {
    Whole(u16, Vec<u8>),
    /// The connection was closed, or no more came for some time, after this part of a body of this length.
    Part(Vec<u8>, usize, ErrorKind),
    /// There was no answer.
    Nothing(ErrorKind),
}

/// A client that knows nothing but a socket.
struct Plain(BufReader<TcpStream>);

impl Plain {
    fn connect(url: &str, patience: Duration) -> std::io::Result<Plain> {
        let stream = TcpStream::connect(url.strip_prefix("http://").unwrap())?;
        stream.set_read_timeout(Some(patience)).unwrap();
        Ok(Plain(BufReader::new(stream)))
    }

    fn ask(&mut self, method: &str, path: &str, body: &[u8]) -> Got {
        let head = format!(
            "{method} {path} HTTP/1.1\r\nHost: signed.example:9\r\nX-Amz-Date: now\r\nContent-Length: {}\r\n\r\n",
            body.len()
        );
        self.0.get_mut().write_all(&[head.as_bytes(), body].concat()).unwrap();
        self.answer(method).unwrap_or_else(|e| Got::Nothing(e.kind()))
    }

    fn answer(&mut self, method: &str) -> std::io::Result<Got> {
        let (mut status, mut length) = (0, 0);
        loop {
            let mut line = String::new();
            if self.0.read_line(&mut line)? == 0 {
                return Err(ErrorKind::UnexpectedEof.into());
            }
            let line = line.trim_end().to_ascii_lowercase();
            match line.split_once(' ') {
                Some(("http/1.1", rest)) => status = rest[..3].parse().unwrap(),
                Some(("content-length:", rest)) => length = rest.parse().unwrap(),
                _ if line.is_empty() => break,
                _ => {}
            }
        }
        if method == "HEAD" {
            return Ok(Got::Whole(status, length.to_string().into_bytes()));
        }
        let (mut body, mut part) = (Vec::new(), [0; 4096]);
        while body.len() < length {
            let most = part.len().min(length - body.len());
            match self.0.read(&mut part[..most]) {
                Ok(0) => return Ok(Got::Part(body, length, ErrorKind::UnexpectedEof)),
                Ok(n) => body.extend_from_slice(&part[..n]),
                Err(e) => return Ok(Got::Part(body, length, e.kind())),
            }
        }
        Ok(Got::Whole(status, body))
    }
}

fn get(proxy: &StoreProxy, path: &str) -> Got {
    Plain::connect(&proxy.url(), LONG).unwrap().ask("GET", path, b"")
}

fn body(n: u8) -> Vec<u8> {
    (0..200_000).map(|at| (at * 7 + usize::from(n)) as u8 ^ n).collect()
}

/// A folder of objects `a`, `b`, ...
fn folder() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    (b'a'..=b'h')
        .for_each(|n| std::fs::write(folder.path().join(char::from(n).to_string()), body(n)).unwrap());
    folder
}

fn start(folder: &tempfile::TempDir, model: StoreModel) -> StoreProxy {
    let settings = StoreProxySettings::new(Origin::Folder(folder.path().to_owned()));
    StoreProxy::start(StoreProxySettings { model, ..settings }).unwrap()
}

fn assert_adds_up(figures: &StoreFigures) {
    let ends = figures.statuses.values().sum::<u64>() + figures.unanswered + figures.in_flight;
    assert_eq!(figures.total_requests(), ends, "{figures:?}");
    assert_eq!(figures.objects, figures.gets.len() as u64);
    assert_eq!(figures.most_gets, figures.gets.values().max().copied().unwrap_or(0));
}

#[test]
fn each_fault_is_what_a_client_sees() {
    let folder = folder();
    let proxy = start(&folder, StoreModel::default());
    let whole = Got::Whole(200, body(b'a'));
    assert_eq!(get(&proxy, "/a"), whole);
    assert_eq!(get(&proxy, "/missing").clone(), Got::Whole(404, vec![]));
    let mut plain = Plain::connect(&proxy.url(), LONG).unwrap();
    assert_eq!(plain.ask("HEAD", "/a", b""), Got::Whole(200, b"200000".to_vec()));
    assert_eq!(plain.ask("PUT", "/a", b"x"), Got::Whole(405, vec![]), "a folder is only read");
    assert_eq!(get(&proxy, "/b"), Got::Whole(200, body(b'b')));
    for fault in StoreFault::ALL {
        proxy.set_model(StoreModel { next: vec![fault], ..StoreModel::default() }).unwrap();
        assert_eq!(proxy.model().next, [fault]);
        let patience = if fault == StoreFault::StalledBody { Duration::from_millis(200) } else { LONG };
        let got = Plain::connect(&proxy.url(), patience).unwrap().ask("GET", "/a", b"");
        let is_part = |part: &[u8], kind, expected: &[ErrorKind]| {
            part.len() < 200_000 && part == &body(b'a')[..part.len()] && expected.contains(&kind)
        };
        let is_seen = match (fault, &got) {
            (StoreFault::FlippedBit, Got::Whole(200, bytes)) => {
                let wrong: u32 = bytes.iter().zip(body(b'a')).map(|(a, b)| (a ^ b).count_ones()).sum();
                bytes.len() == 200_000 && wrong == 1
            }
            (StoreFault::OtherObject, got) => *got == Got::Whole(200, body(b'b')),
            (StoreFault::CutBody, Got::Part(part, 200_000, kind)) => {
                is_part(part, *kind, &[ErrorKind::UnexpectedEof])
            }
            (StoreFault::StalledBody, Got::Part(part, 200_000, kind)) => {
                is_part(part, *kind, &[ErrorKind::WouldBlock, ErrorKind::TimedOut])
            }
            (StoreFault::Reset, got) => *got == Got::Nothing(ErrorKind::ConnectionReset),
            (_, Got::Whole(status, _)) => Some(*status) == fault.status(),
            _ => false,
        };
        assert!(is_seen, "{fault:?}: {got:?}");
        assert_eq!(proxy.figures().faults[&fault], 1, "{fault:?}");
        assert_eq!(get(&proxy, "/a"), whole, "once is enough: {fault:?}");
    }
    // A body that stands still for some time goes on.
    let next = vec![StoreFault::StalledBody];
    proxy.set_model(StoreModel { next, stall_ns: 1_000_000, ..StoreModel::default() }).unwrap();
    assert_eq!(get(&proxy, "/a"), whole);
    assert_adds_up(&proxy.figures());
    proxy.clear_figures();
    assert_eq!(proxy.figures(), StoreFigures::default());
}

#[test]
fn a_seed_repeats_whatever_the_order_and_the_figures_add_up() {
    let folder = folder();
    let chances = StoreFault::ALL.into_iter().filter(|fault| *fault != StoreFault::OtherObject);
    let model = StoreModel {
        faults: chances.map(|fault| (fault, 0.08)).collect(),
        at: "/".into(),
        stall_ns: 1_000_000,
        ..StoreModel::default()
    };
    let run = |seed: u64, is_backwards: bool| {
        let settings = StoreProxySettings::new(Origin::Folder(folder.path().to_owned()));
        let proxy = StoreProxy::start(StoreProxySettings { model: model.clone(), seed, ..settings }).unwrap();
        let mut paths: Vec<_> = (b'a'..=b'h').map(|n| format!("/{}", char::from(n))).collect();
        if is_backwards {
            paths.reverse();
        }
        // All objects at once, each eight times.
        let got: BTreeMap<_, _> = std::thread::scope(|scope| {
            let each = |path: String| {
                let proxy = &proxy;
                scope.spawn(move || (path.clone(), (0..8).map(|_| get(proxy, &path)).collect::<Vec<_>>()))
            };
            let all: Vec<_> = paths.into_iter().map(each).collect();
            all.into_iter().map(|one| one.join().unwrap()).collect()
        });
        let figures = proxy.figures();
        assert_adds_up(&figures);
        assert_eq!((figures.objects, figures.most_gets, figures.requests["GET"]), (8, 8, 64));
        let statuses =
            [403, 404, 429, 500, 503].map(|status| figures.statuses.get(&status).copied().unwrap_or(0));
        let injected = figures.faults.iter().filter(|(fault, _)| fault.status().is_some());
        assert_eq!(statuses.iter().sum::<u64>(), injected.map(|(_, count)| count).sum::<u64>());
        assert_eq!(figures.unanswered, figures.faults.get(&StoreFault::Reset).copied().unwrap_or(0));
        assert!(figures.total_faults() > 20, "{figures:?}");
        // A client may see less of a body that is cut than was sent.
        let kinds = |got: Vec<Got>| {
            got.into_iter().map(|got| match got {
                Got::Part(_, length, kind) => Got::Part(vec![], length, kind),
                got => got,
            })
        };
        let got: BTreeMap<_, Vec<_>> =
            got.into_iter().map(|(path, got)| (path, kinds(got).collect())).collect();
        (got, figures.faults)
    };
    let (first, again, other) = (run(7, false), run(7, true), run(8, false));
    assert!(first == again && first.1 != other.1, "{:?} {:?} {:?}", first.1, again.1, other.1);
}

#[test]
fn a_store_that_is_away_answers_nothing_or_refuses_and_comes_back_at_its_port() {
    let folder = folder();
    let proxy = start(&folder, StoreModel { away: Some(Away::Refuses), ..StoreModel::default() });
    let refused = || Plain::connect(&proxy.url(), LONG).err().map(|e| e.kind());
    let away = |away| proxy.set_model(StoreModel { away, ..StoreModel::default() }).unwrap();
    assert_eq!(refused(), Some(ErrorKind::ConnectionRefused));
    away(None);
    let mut kept = Plain::connect(&proxy.url(), LONG).unwrap();
    let whole = Got::Whole(200, body(b'a'));
    assert_eq!(kept.ask("GET", "/a", b""), whole);
    away(Some(Away::Silent));
    let mut impatient = Plain::connect(&proxy.url(), Duration::from_millis(50)).unwrap();
    assert!(matches!(
        impatient.ask("GET", "/a", b""),
        Got::Nothing(ErrorKind::WouldBlock | ErrorKind::TimedOut)
    ));
    drop(impatient);
    let waiting = std::thread::spawn(move || (kept.ask("GET", "/a", b""), kept));
    let until = Instant::now() + LONG;
    while proxy.figures().requests["GET"] < 3 {
        assert!(Instant::now() < until, "{:?}", proxy.figures());
        std::thread::sleep(Duration::from_millis(1));
    }
    away(None);
    let (got, mut kept) = waiting.join().unwrap();
    assert_eq!(got, whole, "it is answered when the store is back");
    away(Some(Away::Refuses));
    assert_eq!(refused(), Some(ErrorKind::ConnectionRefused));
    let mut byte = [0];
    assert_eq!(kept.0.read(&mut byte).map_err(|e| e.kind()), Err(ErrorKind::ConnectionReset));
    away(None);
    assert_eq!(get(&proxy, "/a"), whole);
    let figures = proxy.figures();
    assert_adds_up(&figures);
    assert_eq!((figures.requests["GET"], figures.statuses[&200], figures.unanswered), (4, 3, 1));
    let url = proxy.url();
    drop(proxy);
    assert!(Plain::connect(&url, LONG).is_err(), "it has ended");
}

/// A store that answers each request with what it got.
fn echo() -> String {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    // It ends with the test's process.
    std::thread::spawn(move || {
        for stream in listener.incoming().map_while(Result::ok) {
            let mut reader = BufReader::new(stream);
            let (mut head, mut length) = (String::new(), 0);
            while !head.ends_with("\r\n\r\n") && reader.read_line(&mut head).unwrap() > 0 {
                let line = head.lines().last().unwrap_or_default();
                length = line.strip_prefix("content-length: ").map_or(length, |value| value.parse().unwrap());
            }
            let mut body = vec![0; length];
            reader.read_exact(&mut body).unwrap();
            let answer = [head.as_bytes(), &body].concat();
            // In chunks, which is the store's own matter.
            let begin = format!(
                "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nETag: \"7\"\r\n\r\n{:x}\r\n",
                answer.len()
            );
            let stream = reader.get_mut();
            stream.write_all(&[begin.as_bytes(), &answer, b"\r\n0\r\n\r\n"].concat()).unwrap();
        }
    });
    url
}

#[test]
fn a_request_reaches_the_store_as_it_was_signed() {
    let origin = Origin::http(&echo()).unwrap();
    let proxy = StoreProxy::start(StoreProxySettings::new(origin)).unwrap();
    let mut plain = Plain::connect(&proxy.url(), LONG).unwrap();
    for (method, path, sent) in [
        ("PUT", "/images/a%2Fb%20c?partNumber=1&uploadId=x%2By", &body(b'x')[..]),
        ("POST", "/images?delete", b"<Delete/>"),
        ("GET", "/images/?list-type=2&prefix=names%2F", b""),
    ] {
        let Got::Whole(200, got) = plain.ask(method, path, sent) else { panic!("{method}") };
        let at = got.windows(4).position(|bytes| bytes == b"\r\n\r\n").unwrap();
        let (head, received) = (String::from_utf8_lossy(&got[..at]), &got[at + 4..]);
        assert!(head.starts_with(&format!("{method} {path} HTTP/1.1\r\n")), "{head}");
        assert!(
            head.contains("\r\nhost: signed.example:9\r\n") && head.contains("\r\nx-amz-date: now\r\n"),
            "{head}"
        );
        assert_eq!(received, sent, "{method}");
    }
    let figures = proxy.figures();
    assert_eq!((figures.received_bytes, figures.objects), (200_009, 0));
    assert_adds_up(&figures);
    // A store that is not there.
    let gone = StoreProxy::start(StoreProxySettings::new(Origin::Http("127.0.0.1:1".into()))).unwrap();
    assert!(
        matches!(get(&gone, "/a"), Got::Whole(502, why) if why.starts_with(b"the store behind the proxy"))
    );
    assert_eq!(gone.figures().store_failures, 1);
}

#[test]
fn the_control_endpoint_changes_the_model_and_shows_the_figures() {
    let folder = folder();
    let settings = StoreProxySettings::new(Origin::Folder(folder.path().to_owned()));
    let control = Some("127.0.0.1:0".parse().unwrap());
    let proxy = StoreProxy::start(StoreProxySettings { control, ..settings }).unwrap();
    let mut control = Plain::connect(&proxy.control_url().unwrap(), LONG).unwrap();
    let set = br#"{ "faults": { "status-503": 1.0 }, "next": ["cut-body"], "at": "/a" }"#;
    assert_eq!(control.ask("POST", "/model", set), Got::Whole(204, vec![]));
    assert!(matches!(get(&proxy, "/a"), Got::Part(..)));
    assert!(matches!(get(&proxy, "/a"), Got::Whole(503, _)));
    assert_eq!(get(&proxy, "/b"), Got::Whole(200, body(b'b')));
    for bad in [&b"{"[..], br#"{"faults":{"x":1}}"#, br#"{"faults":{"reset":2}}"#, br#"{"rpm":1}"#] {
        assert!(matches!(control.ask("POST", "/model", bad), Got::Whole(400, why) if !why.is_empty()));
    }
    let Got::Whole(200, model) = control.ask("GET", "/model", b"") else { panic!() };
    let model: StoreModel = serde_json::from_slice(&model).unwrap();
    assert_eq!((&model, model.at.as_str(), model.next.len()), (&proxy.model(), "/a", 0));
    let Got::Whole(200, figures) = control.ask("GET", "/figures", b"") else { panic!() };
    let figures: StoreFigures = serde_json::from_slice(&figures).unwrap();
    assert_eq!(figures, proxy.figures());
    assert_eq!((figures.gets["/a"], figures.total_faults(), figures.statuses[&503]), (2, 2, 1));
    assert_eq!(control.ask("DELETE", "/figures", b""), Got::Whole(204, vec![]));
    assert_eq!(proxy.figures().total_requests(), 0);
    assert_eq!(control.ask("GET", "/", b""), Got::Whole(404, vec![]));
}

/// Of the lane that measures a pace: see scripts/test-runner.
mod paces {
    use super::*;

    fn took(proxy: &StoreProxy, paths: &[&str]) -> f64 {
        let begun = Instant::now();
        std::thread::scope(|scope| {
            for path in paths {
                scope.spawn(move || assert!(matches!(get(proxy, path), Got::Whole(200, _))));
            }
        });
        begun.elapsed().as_secs_f64()
    }

    #[test]
    fn answers_take_the_time_and_the_bandwidth_of_the_model() {
        let folder = folder();
        let proxy = start(&folder, StoreModel { latency_ns: 150_000_000, ..StoreModel::default() });
        let late = took(&proxy, &["/a"]);
        assert!((0.15..0.4).contains(&late), "{late}");
        let late = took(&proxy, &["/a", "/b", "/c", "/d"]);
        assert!((0.15..0.4).contains(&late), "latency is of any number at once: {late}");
        proxy.set_model(StoreModel { bandwidth_bytes: 2_000_000, ..StoreModel::default() }).unwrap();
        let alone = took(&proxy, &["/a", "/a", "/a", "/a"]);
        assert!((0.38..0.7).contains(&alone), "800 KB at 2 MB/s: {alone}");
        let begun = Instant::now();
        let sent = Plain::connect(&proxy.url(), LONG).unwrap().ask("PUT", "/a", &[0; 600_000]);
        let upload = begun.elapsed().as_secs_f64();
        assert!(sent == Got::Whole(405, vec![]) && (0.28..0.6).contains(&upload), "{upload}");
    }
}
