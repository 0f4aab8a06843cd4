//! Reads the events of a host as server-sent events. Owns a connection and the incomplete event.
//!
//! Invariant: the memory for an event is bounded, and a daemon that sends nothing for too long counts as gone.

use super::{Client, ClientError};
use crate::Event;
use http_body_util::{BodyExt, Full};
use hyper::body::{Bytes, Incoming};
use hyper::client::conn::http1::SendRequest;
use serde::de::DeserializeOwned;
use std::collections::VecDeque;
use std::time::Duration;

/// Longest event.
const MAX_EVENT_BYTES: usize = 1 << 20;
/// Longest time without data: an idle daemon sends a comment every 15 s.
const SILENCE: Duration = Duration::from_secs(60);

/// Stream of the events of a host.
pub struct Following<'a> {
    pub(super) client: &'a Client,
    /// Keeps the connection open.
    pub(super) _sender: SendRequest<Full<Bytes>>,
    pub(super) body: Incoming,
    pub(super) lines: Lines,
}

impl Following<'_> {
    /// Waits for the next event. `None`: the daemon has ended.
    pub fn next_event(&mut self) -> Result<Option<Event>, ClientError> {
        self.next_item()
    }

    /// The same, for streams of other data.
    pub fn next_item<T: DeserializeOwned>(&mut self) -> Result<Option<T>, ClientError> {
        let client = self.client;
        loop {
            if let Some(data) = self.lines.whole.pop_front() {
                let event = serde_json::from_slice(&data);
                return event
                    .map(Some)
                    .map_err(|e| client.broken(format!("its event is not understood: {e}")));
            }
            let frame =
                client.runtime.block_on(async { tokio::time::timeout(SILENCE, self.body.frame()).await });
            let frame = match frame {
                Err(_) => {
                    return Err(client.broken(format!("it has sent nothing for {} s", SILENCE.as_secs())));
                }
                Ok(None) => return Ok(None),
                Ok(Some(frame)) => frame.map_err(|e| client.broken(e.to_string()))?,
            };
            if let Ok(bytes) = frame.into_data()
                && !self.lines.take(&bytes)
            {
                return Err(client.broken(format!("an event is longer than {MAX_EVENT_BYTES} bytes")));
            }
        }
    }
}

/// Assembles the data of events line by line (WHATWG HTML, 9.2.6). Lines end as spillwayd ends them.
#[derive(Default)]
pub struct Lines {
    line: Vec<u8>,
    data: Vec<u8>,
    whole: VecDeque<Vec<u8>>,
}

impl Lines {
    /// Returns the data of the next whole event.
    pub fn next_event(&mut self) -> Option<Vec<u8>> {
        self.whole.pop_front()
    }

    /// Adds received bytes. Returns `false` if an event is too long.
    pub fn take(&mut self, mut bytes: &[u8]) -> bool {
        while let Some(end) = bytes.iter().position(|byte| *byte == b'\n') {
            self.line.extend_from_slice(&bytes[..end]);
            bytes = &bytes[end + 1..];
            self.end_line();
        }
        self.line.extend_from_slice(bytes);
        self.line.len() + self.data.len() <= MAX_EVENT_BYTES
    }

    fn end_line(&mut self) {
        let line = std::mem::take(&mut self.line);
        let line = line.strip_suffix(b"\r").unwrap_or(&line);
        if line.is_empty() {
            // A comment that keeps the connection alive has no data.
            if !self.data.is_empty() {
                self.whole.push_back(std::mem::take(&mut self.data));
            }
        } else if let Some(data) = line.strip_prefix(b"data:") {
            self.data.extend_from_slice(data.strip_prefix(b" ").unwrap_or(data));
            self.data.push(b'\n');
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_are_the_same_however_they_are_cut() {
        let text =
            b": nothing yet\n\nid: 1\ndata: {\"a\":\ndata: 1}\n\r\nevent: x\n\nid\ndata:2\r\n\ndata: 3\n";
        for cut in 1..text.len() {
            let mut lines = Lines::default();
            assert!(text.chunks(cut).all(|part| lines.take(part)));
            assert_eq!(lines.whole, [b"{\"a\":\n1}\n".to_vec(), b"2\n".to_vec()], "{cut}");
            assert_eq!(lines.data, b"3\n");
        }
    }

    #[test]
    fn what_never_ends_is_refused() {
        let mut lines = Lines::default();
        let takes =
            |lines: &mut Lines, part: &[u8]| (0..=MAX_EVENT_BYTES / part.len()).all(|_| lines.take(part));
        assert!(!takes(&mut lines, &[b'x'; 4096]));
        let mut lines = Lines::default();
        assert!(!takes(&mut lines, &[b"data: ", [b'x'; 4096].as_slice(), b"\n"].concat()));
        let mut lines = Lines::default();
        assert!(takes(&mut lines, b": nothing yet\n\n"));
    }
}
