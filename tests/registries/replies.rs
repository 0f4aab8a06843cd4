//! A web server of the test's that answers what it is told, right or wrong.

use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::thread;

/// What is asked: the path with its query, and the header `Authorization`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Asked {
    pub path: String,
    pub authorization: Option<String>,
}

pub struct Replies {
    pub port: u16,
    asked: Arc<Mutex<Vec<Asked>>>,
}

impl Replies {
    /// Answers each request with what this writes, and ends the connection then.
    pub fn new(
        reply: impl Fn(&Asked, &mut TcpStream) -> std::io::Result<()> + Send + Sync + 'static,
    ) -> Replies {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let asked = Arc::new(Mutex::new(Vec::new()));
        let (all, reply) = (Arc::clone(&asked), Arc::new(reply));
        // It ends with the test's process.
        thread::spawn(move || {
            for stream in listener.incoming().map_while(Result::ok) {
                let (all, reply) = (Arc::clone(&all), Arc::clone(&reply));
                thread::spawn(move || serve(&all, &*reply, stream));
            }
        });
        Replies { port, asked }
    }

    pub fn url(&self, path: &str) -> String {
        format!("http://127.0.0.1:{}{path}", self.port)
    }

    pub fn asked(&self) -> Vec<Asked> {
        self.asked.lock().unwrap().clone()
    }
}

fn serve(
    all: &Mutex<Vec<Asked>>,
    reply: &dyn Fn(&Asked, &mut TcpStream) -> std::io::Result<()>,
    mut stream: TcpStream,
) -> std::io::Result<()> {
    let mut lines = BufReader::new(stream.try_clone()?).lines().map_while(Result::ok);
    let first = lines.next().unwrap_or_default();
    let headers: Vec<String> = lines.take_while(|line| !line.is_empty()).collect();
    let authorization = headers.iter().find_map(|line| {
        let (name, value) = line.split_once(": ")?;
        name.eq_ignore_ascii_case("authorization").then(|| value.to_owned())
    });
    let asked = Asked { path: first.split(' ').nth(1).unwrap_or_default().to_owned(), authorization };
    all.lock().unwrap().push(asked.clone());
    reply(&asked, &mut stream)
}

/// Writes an answer with a body.
pub fn answer(to: &mut TcpStream, status: &str, headers: &str, body: &[u8]) -> std::io::Result<()> {
    write!(to, "HTTP/1.1 {status}\r\n{headers}Content-Length: {}\r\nConnection: close\r\n\r\n", body.len())?;
    to.write_all(body)
}
