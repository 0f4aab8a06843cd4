//! A web server of a folder that counts what is asked, and answers wrongly when it is told to.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::thread;
use std::time::Duration;

/// How it answers requests for chunks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    None,
    /// Not at all, until that changes.
    Hangs,
    /// After a second and a half.
    Slow,
    /// With 503.
    Refuses,
    /// With a byte that is wrong.
    Flips,
    /// With less than it says.
    Cuts,
    /// With one of the three before, every second time.
    Sometimes,
    /// With the address of the same object at the other server.
    Redirects,
    /// With an error whose text has no end.
    Babbles,
}

struct State {
    folder: PathBuf,
    fault: Mutex<Fault>,
    changed: Condvar,
    gets: Mutex<BTreeMap<String, u64>>,
    /// What is answered with 403.
    refused: Mutex<BTreeSet<String>>,
    answers: AtomicU64,
    other: Mutex<String>,
}

pub struct Web {
    state: Arc<State>,
    pub url: String,
}

impl Web {
    pub fn new(folder: &Path) -> Web {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let state = Arc::new(State {
            folder: folder.to_owned(),
            fault: Mutex::new(Fault::None),
            changed: Condvar::new(),
            gets: Mutex::default(),
            refused: Mutex::default(),
            answers: AtomicU64::new(0),
            other: Mutex::default(),
        });
        let of_server = Arc::clone(&state);
        // It ends with the test's process.
        thread::spawn(move || {
            for stream in listener.incoming().map_while(Result::ok) {
                let state = Arc::clone(&of_server);
                thread::spawn(move || _ = serve(&state, stream));
            }
        });
        Web { state, url }
    }

    /// The server to which requests are redirected.
    pub fn redirect_to(&self, other: &Web) {
        *self.state.other.lock().unwrap() = other.url.clone();
    }

    pub fn set(&self, fault: Fault) {
        *self.state.fault.lock().unwrap() = fault;
        self.state.changed.notify_all();
    }

    /// Refuses these paths, and no others.
    pub fn refuse(&self, paths: impl IntoIterator<Item = String>) {
        *self.state.refused.lock().unwrap() = paths.into_iter().collect();
    }

    /// How often each path that begins so was asked for.
    pub fn gets(&self, prefix: &str) -> BTreeMap<String, u64> {
        let gets = self.state.gets.lock().unwrap();
        gets.iter()
            .filter(|(path, _)| path.starts_with(prefix))
            .map(|(path, count)| (path.clone(), *count))
            .collect()
    }

    pub fn forget(&self) {
        self.state.gets.lock().unwrap().clear();
    }
}

fn serve(state: &State, stream: TcpStream) -> std::io::Result<()> {
    let mut reader = BufReader::new(stream.try_clone()?);
    let mut writer = stream;
    loop {
        let mut line = String::new();
        if reader.read_line(&mut line)? == 0 {
            return Ok(());
        }
        let path = line.split(' ').nth(1).unwrap_or_default().to_owned();
        let mut header = String::new();
        while reader.read_line(&mut header)? > 2 {
            header.clear();
        }
        *state.gets.lock().unwrap().entry(path.clone()).or_default() += 1;
        if state.refused.lock().unwrap().contains(&path) {
            write!(writer, "HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\n\r\n")?;
            continue;
        }
        let mut fault = Fault::None;
        if path.starts_with("/chunks/") {
            let hangs = state
                .changed
                .wait_while(state.fault.lock().unwrap(), |fault| *fault == Fault::Hangs)
                .unwrap();
            fault = *hangs;
        }
        let n = state.answers.fetch_add(1, Ordering::Relaxed);
        if fault == Fault::Sometimes {
            fault = [Fault::None, Fault::Flips, Fault::None, Fault::Cuts, Fault::None, Fault::Refuses]
                [(n % 6) as usize];
        }
        if fault == Fault::Slow {
            thread::sleep(Duration::from_millis(1500));
        }
        if fault == Fault::Refuses {
            write!(writer, "HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\n\r\n")?;
            continue;
        }
        if fault == Fault::Redirects {
            let other = state.other.lock().unwrap().clone();
            write!(writer, "HTTP/1.1 302 Found\r\nLocation: {other}{path}\r\nContent-Length: 0\r\n\r\n")?;
            continue;
        }
        if fault == Fault::Babbles {
            write!(writer, "HTTP/1.1 500 Internal Server Error\r\nContent-Length: {}\r\n\r\n", 1u64 << 40)?;
            let text = [b'x'; 1 << 16];
            // Until nobody reads on.
            loop {
                writer.write_all(&text)?;
            }
        }
        let Ok(mut body) = fs::read(state.folder.join(path.trim_start_matches('/'))) else {
            write!(writer, "HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")?;
            continue;
        };
        let whole = body.len();
        match fault {
            Fault::Flips => body[whole / 2] ^= 1,
            Fault::Cuts => body.truncate(whole - 1),
            _ => {}
        }
        write!(writer, "HTTP/1.1 200 OK\r\nContent-Length: {whole}\r\n\r\n")?;
        writer.write_all(&body)?;
        if body.len() < whole {
            return Ok(());
        }
    }
}
