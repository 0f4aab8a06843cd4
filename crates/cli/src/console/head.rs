//! The head of an HTTP/1.1 request (RFC 9112), as far as a relay needs it. What is not plainly one request is refused.

use std::io::{self, Read};
use std::net::TcpStream;
use std::time::{Duration, Instant};

/// Longest head.
const MAX_BYTES: usize = 16 << 10;

/// Where a head comes from.
pub trait Source {
    /// Reads what comes first, until a time.
    fn read_until(&mut self, buffer: &mut [u8], until: Instant) -> io::Result<usize>;
}

impl Source for TcpStream {
    fn read_until(&mut self, buffer: &mut [u8], until: Instant) -> io::Result<usize> {
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(io::ErrorKind::TimedOut.into());
        }
        self.set_read_timeout(Some(left))?;
        self.read(buffer)
    }
}

/// The head of a request.
#[derive(Debug)]
pub struct Head {
    /// `GET`, for example.
    pub method: String,
    /// Path and query.
    pub target: String,
    headers: Vec<(String, String)>,
    /// What came behind the head: the begin of the body.
    pub rest: Vec<u8>,
}

/// Why no request was read.
#[derive(Debug, PartialEq, Eq)]
pub enum HeadError {
    /// Nothing came, or not all of it.
    Gone,
    /// It is no request, or one that this relay does not take.
    Invalid(&'static str),
}

impl Head {
    /// Reads the head of the one request of a connection, for so long.
    pub fn read(from: &mut impl Source, longest: Duration) -> Result<Head, HeadError> {
        let until = Instant::now() + longest;
        let mut bytes = Vec::new();
        let mut buffer = [0; 4096];
        // Where the end may begin: what is before has been looked at.
        let mut from_here = 0;
        let end = loop {
            if let Some(end) = bytes[from_here..].windows(4).position(|four| four == b"\r\n\r\n") {
                break from_here + end;
            }
            from_here = bytes.len().saturating_sub(3);
            if bytes.len() > MAX_BYTES {
                return Err(HeadError::Invalid("the head of the request is too long"));
            }
            match from.read_until(&mut buffer, until) {
                Ok(n) if n > 0 => bytes.extend_from_slice(&buffer[..n]),
                _ => return Err(HeadError::Gone),
            }
        };
        let rest = bytes.split_off(end + 4);
        Head::parse(&bytes[..end], rest).ok_or(HeadError::Invalid("the head of the request cannot be read"))
    }

    fn parse(bytes: &[u8], rest: Vec<u8>) -> Option<Head> {
        let text = std::str::from_utf8(bytes).ok()?;
        let mut lines = text.split("\r\n");
        let mut words = lines.next()?.split(' ');
        let (method, target, version) = (words.next()?, words.next()?, words.next()?);
        let is_method = !method.is_empty() && method.bytes().all(|byte| byte.is_ascii_uppercase());
        let is_target = target.starts_with('/') && target.bytes().all(|byte| byte.is_ascii_graphic());
        if !is_method || !is_target || version != "HTTP/1.1" || words.next().is_some() {
            return None;
        }
        let headers = lines.map(|line| {
            let (name, value) = line.split_once(':')?;
            let is_name = !name.is_empty()
                && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_".contains(&byte));
            let is_value = value.bytes().all(|byte| !byte.is_ascii_control() || byte == b'\t');
            (is_name && is_value).then(|| (name.to_ascii_lowercase(), value.trim().to_owned()))
        });
        let headers = headers.collect::<Option<Vec<_>>>()?;
        Some(Head { method: method.into(), target: target.into(), headers, rest })
    }

    /// Takes a folder off the target. False: the target is not below it.
    pub fn leave_folder(&mut self, folder: &str) -> bool {
        let below = self.target.strip_prefix('/').and_then(|path| path.strip_prefix(folder));
        match below.filter(|path| path.starts_with('/')).map(str::to_owned) {
            Some(path) => {
                self.target = path;
                true
            }
            None => false,
        }
    }

    /// The value of a header that is there once. None: it is missing, or there more than once.
    pub fn only(&self, name: &str) -> Option<&str> {
        let mut values = self.headers.iter().filter(|(other, _)| other == name);
        let (_, value) = values.next()?;
        values.next().is_none().then_some(value)
    }

    /// The value of a cookie.
    pub fn cookie(&self, name: &str) -> Option<&str> {
        let cookies = self.headers.iter().filter(|(other, _)| other == "cookie");
        let mut pairs =
            cookies.flat_map(|(_, value)| value.split(';')).filter_map(|pair| pair.trim().split_once('='));
        pairs.find(|(other, _)| *other == name).map(|(_, value)| value)
    }

    /// The value of a parameter of the query.
    pub fn parameter(&self, name: &str) -> Option<&str> {
        let (_, query) = self.target.split_once('?')?;
        query
            .split('&')
            .filter_map(|pair| pair.split_once('='))
            .find(|(other, _)| *other == name)
            .map(|(_, value)| value)
    }

    /// Whether another protocol is asked for.
    pub fn is_upgrade(&self) -> bool {
        self.headers.iter().any(|(name, _)| name == "upgrade")
    }

    /// The request for the daemon: without what is between the browser and this relay. The daemon closes the connection after it, so that
    /// nothing that comes behind it is taken for another one.
    pub fn onward(&self) -> Vec<u8> {
        let mut text = format!("{} {} HTTP/1.1\r\n", self.method, self.target);
        let own = ["connection", "keep-alive", "proxy-connection", "cookie", "authorization"];
        for (name, value) in self.headers.iter().filter(|(name, _)| !own.contains(&name.as_str())) {
            text += &format!("{name}: {value}\r\n");
        }
        text += if self.is_upgrade() {
            "connection: upgrade, close\r\n\r\n"
        } else {
            "connection: close\r\n\r\n"
        };
        [text.as_bytes(), &self.rest].concat()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    impl Source for &[u8] {
        fn read_until(&mut self, buffer: &mut [u8], _: Instant) -> io::Result<usize> {
            self.read(buffer)
        }
    }

    fn read(text: &str) -> Result<Head, HeadError> {
        Head::read(&mut text.as_bytes(), Duration::from_secs(60))
    }

    #[test]
    fn what_is_not_below_a_folder_stays_as_it_is() {
        for (target, below) in [
            ("/ab/x?y=/ab", Some("/x?y=/ab")),
            ("/ab/", Some("/")),
            ("/ab", None),
            ("/abc/x", None),
            ("/x/ab/", None),
        ] {
            let mut head = read(&format!("GET {target} HTTP/1.1\r\n\r\n")).unwrap();
            assert_eq!(head.leave_folder("ab").then_some(head.target.as_str()), below, "{target}");
        }
    }

    #[test]
    fn a_head_is_read_and_passed_on_without_what_is_the_relays() {
        let text = "POST /v1/x?key=a&b=c HTTP/1.1\r\nHost: localhost:1\r\nCookie: a=b; c=d\r\nConnection: keep-alive\r\n\
                    Authorization: Bearer x\r\nContent-Length: 2\r\n\r\n{}";
        let head = read(text).unwrap();
        assert_eq!(
            (head.only("host"), head.cookie("c"), head.cookie("d")),
            (Some("localhost:1"), Some("d"), None)
        );
        assert_eq!(
            (head.parameter("key"), head.parameter("b"), head.parameter("c")),
            (Some("a"), Some("c"), None)
        );
        let onward = String::from_utf8(head.onward()).unwrap();
        let expected = "POST /v1/x?key=a&b=c HTTP/1.1\r\nhost: localhost:1\r\ncontent-length: 2\r\nconnection: close\r\n\r\n{}";
        assert_eq!(onward, expected);
    }

    #[test]
    fn what_is_not_plainly_one_request_is_refused() {
        for wrong in [
            "GET / HTTP/1.0\r\n\r\n",
            "GET http://x/ HTTP/1.1\r\n\r\n",
            "get / HTTP/1.1\r\n\r\n",
            "GET  / HTTP/1.1\r\n\r\n",
            "GET / HTTP/1.1 x\r\n\r\n",
            "GET / HTTP/1.1\r\nA: b\r\n c\r\n\r\n",
            "GET / HTTP/1.1\r\nA : b\r\n\r\n",
            "GET / HTTP/1.1\r\nA: b\nC: d\r\n\r\n",
            "GET / HTTP/1.1\r\nnone\r\n\r\n",
            "GET / HTTP/1.1\r\nA: \0\r\n\r\n",
        ] {
            assert!(matches!(read(wrong), Err(HeadError::Invalid(_))), "{wrong:?}");
        }
        assert_eq!(read("GET / HTTP/1.1\r\nA: b\r\n").unwrap_err(), HeadError::Gone);
        let long = format!("GET / HTTP/1.1\r\nA: {}\r\n\r\n", "x".repeat(MAX_BYTES * 2));
        assert!(matches!(read(&long), Err(HeadError::Invalid(_))));
        assert!(read("GET / HTTP/1.1\r\nA: b\r\nA: c\r\n\r\n").unwrap().only("a").is_none());
    }
}
