//! A client of WebSockets on a unix socket (RFC 6455), as a test needs one: no extensions, and frames that may be wrong.

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

/// The example of the standard (1.3): a key, and what answers it.
const KEY: &str = "dGhlIHNhbXBsZSBub25jZQ==";
const ANSWER: &str = "s3pPLMBiTxaQ9kYGzzhZRbK+xOo=";
/// Longest head of an answer, and longest frame.
const MOST_BYTES: usize = 1 << 20;

/// An open WebSocket.
#[derive(Debug)]
pub struct WebSocket {
    stream: UnixStream,
    /// The head of the answer.
    pub head: String,
    /// Whether pings are answered. They are at first.
    pub answers_pings: bool,
    /// Answers to own pings that were received.
    pub pongs: usize,
}

/// What a server has sent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Message {
    /// Text.
    Text(String),
    /// Bytes.
    Binary(Vec<u8>),
    /// The end, its code and reason.
    Close(u16, String),
    /// The connection has ended without a word.
    Gone,
}

/// Asks for a WebSocket at this path. `Err`: the whole answer, which is another one.
pub fn open(socket: &Path, path: &str, headers: &[(&str, &str)]) -> io::Result<Result<WebSocket, String>> {
    let mut stream = UnixStream::connect(socket)?;
    stream.set_read_timeout(Some(Duration::from_secs(60)))?;
    let mut request = format!(
        "GET {path} HTTP/1.1\r\nHost: host.example\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\
         Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: {KEY}\r\n"
    );
    headers.iter().for_each(|(name, value)| request += &format!("{name}: {value}\r\n"));
    stream.write_all(format!("{request}\r\n").as_bytes())?;
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") && head.len() < MOST_BYTES {
        let mut byte = [0];
        stream.read_exact(&mut byte)?;
        head.push(byte[0]);
    }
    let mut head = String::from_utf8_lossy(&head).into_owned();
    if head.starts_with("HTTP/1.1 101 ") {
        if !head.contains(ANSWER) {
            return Err(io::Error::other(format!("a wrong answer to the key: {head}")));
        }
        return Ok(Ok(WebSocket { stream, head, answers_pings: true, pongs: 0 }));
    }
    let length = head.to_ascii_lowercase();
    let length =
        length.split_once("content-length: ").and_then(|(_, rest)| rest.lines().next()?.parse().ok());
    let mut body = vec![0; length.unwrap_or(0)];
    stream.read_exact(&mut body)?;
    head += &String::from_utf8_lossy(&body);
    Ok(Err(head))
}

impl WebSocket {
    /// Sends text.
    pub fn text(&mut self, text: &str) -> io::Result<()> {
        self.frame(1, text.as_bytes())
    }

    /// Sends bytes.
    pub fn binary(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.frame(2, bytes)
    }

    /// Sends a ping.
    pub fn ping(&mut self, payload: &[u8]) -> io::Result<()> {
        self.frame(9, payload)
    }

    /// Lets messages that cannot be sent in this time fail.
    pub fn limit_writes(&self, patience: Duration) -> io::Result<()> {
        self.stream.set_write_timeout(Some(patience))
    }

    /// Begins the closing handshake.
    pub fn close(&mut self, code: u16, reason: &str) -> io::Result<()> {
        self.frame(8, &[&code.to_be_bytes(), reason.as_bytes()].concat())
    }

    /// Sends a whole message of this kind.
    fn frame(&mut self, kind: u8, payload: &[u8]) -> io::Result<()> {
        let mut frame = vec![0x80 | kind];
        match payload.len() {
            length @ 0..=125 => frame.push(0x80 | length as u8),
            length @ 126..=0xffff => {
                frame.push(0x80 | 126);
                frame.extend((length as u16).to_be_bytes());
            }
            length => {
                frame.push(0x80 | 127);
                frame.extend((length as u64).to_be_bytes());
            }
        }
        // A mask is needed, not its secrecy.
        let mask = [1, 2, 3, 4];
        frame.extend(mask);
        frame.extend(payload.iter().zip(mask.iter().cycle()).map(|(byte, mask)| byte ^ mask));
        self.stream.write_all(&frame)
    }

    /// Receives the next message, within this time. `None`: nothing came.
    pub fn receive(&mut self, patience: Duration) -> io::Result<Option<Message>> {
        let until = Instant::now() + patience;
        loop {
            let left = until.saturating_duration_since(Instant::now());
            self.stream.set_read_timeout(Some(left.max(Duration::from_millis(1))))?;
            let mut head = [0; 2];
            match self.stream.read(&mut head[..1]) {
                Ok(0) => return Ok(Some(Message::Gone)),
                Ok(_) => {}
                Err(e) if e.kind() == io::ErrorKind::ConnectionReset => return Ok(Some(Message::Gone)),
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return Ok(None),
                Err(e) => return Err(e),
            }
            self.stream.set_read_timeout(Some(Duration::from_secs(60)))?;
            self.stream.read_exact(&mut head[1..])?;
            let length = match head[1] {
                126 => {
                    let mut length = [0; 2];
                    self.stream.read_exact(&mut length)?;
                    u16::from_be_bytes(length).into()
                }
                127 => {
                    let mut length = [0; 8];
                    self.stream.read_exact(&mut length)?;
                    u64::from_be_bytes(length) as usize
                }
                length => length.into(),
            };
            if head[0] & 0xf0 != 0x80 || length > MOST_BYTES {
                return Err(io::Error::other(format!("a frame {head:?} of {length} bytes")));
            }
            let mut payload = vec![0; length];
            self.stream.read_exact(&mut payload)?;
            let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
            return Ok(Some(match head[0] & 0xf {
                1 => Message::Text(text(&payload)),
                2 => Message::Binary(payload),
                8 => match payload.split_at_checked(2) {
                    Some((code, reason)) => {
                        Message::Close(u16::from_be_bytes([code[0], code[1]]), text(reason))
                    }
                    None => Message::Close(1005, String::new()),
                },
                9 if self.answers_pings => {
                    self.frame(10, &payload)?;
                    continue;
                }
                10 => {
                    self.pongs += 1;
                    continue;
                }
                _ => continue,
            }));
        }
    }
}
