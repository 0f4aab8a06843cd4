//! A stream whose end does not lose the last response: closing a connection with unread data resets it, and the client may
//! then never see what was written before. Owns how much is read, and for how long.
//!
//! Invariant: a client keeps a connection open for at most 2 s after its last response.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Sleep, sleep};

/// Longest time, and most data, that is read after the last response.
const UNREAD: Duration = Duration::from_secs(2);
const MOST_UNREAD_BYTES: usize = 1 << 20;

/// A stream that reads what a client still sends, when it is shut down.
pub struct LingeringStream<S> {
    stream: S,
    end: Option<End>,
}

/// Progress of the end.
struct End {
    alarm: Pin<Box<Sleep>>,
    read_bytes: usize,
    is_shut_down: bool,
}

impl<S> LingeringStream<S> {
    /// Wraps a stream.
    pub fn new(stream: S) -> LingeringStream<S> {
        LingeringStream { stream, end: None }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for LingeringStream<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> AsyncWrite for LingeringStream<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        parts: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(context, parts)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let LingeringStream { stream, end } = &mut *self;
        let end = end.get_or_insert_with(|| End {
            alarm: Box::pin(sleep(UNREAD)),
            read_bytes: 0,
            is_shut_down: false,
        });
        if end.alarm.as_mut().poll(context).is_ready() {
            return Poll::Ready(Ok(()));
        }
        if !end.is_shut_down {
            ready!(Pin::new(&mut *stream).poll_shutdown(context))?;
            end.is_shut_down = true;
        }
        let mut rest = [0; 4 << 10];
        while end.read_bytes < MOST_UNREAD_BYTES {
            let mut buffer = ReadBuf::new(&mut rest);
            ready!(Pin::new(&mut *stream).poll_read(context, &mut buffer))?;
            match buffer.filled().len() {
                0 => break,
                length => end.read_bytes += length,
            }
        }
        Poll::Ready(Ok(()))
    }
}
