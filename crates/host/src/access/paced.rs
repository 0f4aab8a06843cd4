//! A stream with a minimum reading speed: limits how long a client may leave data unread. Owns that measure.
//!
//! Invariant: a write without progress for [`ReaderLimits::stall`], and a reader slower than
//! [`ReaderLimits::bytes_a_second`] in the long run, end the connection with an error.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Instant, Sleep, sleep_until};

/// Limits of a slow reader.
#[derive(Clone, Copy, Debug)]
pub struct ReaderLimits {
    /// Total time that writes may be blocked. Written bytes earn it back, at the rate below.
    pub stall: Duration,
    /// Minimum rate of a reader in the long run.
    pub bytes_a_second: u32,
}

/// A stream that fails if its reader is too slow.
pub struct PacedStream<S> {
    stream: S,
    pace: ReaderLimits,
    /// Time that writes were blocked, minus what was earned back.
    debt: Duration,
    blocked: Option<(Instant, Pin<Box<Sleep>>)>,
}

impl<S> PacedStream<S> {
    /// Wraps a stream.
    pub fn new(stream: S, pace: ReaderLimits) -> PacedStream<S> {
        PacedStream { stream, pace, debt: Duration::ZERO, blocked: None }
    }

    /// Processes the result of a write. Fails if writes were blocked for too long.
    fn watch<T>(
        &mut self,
        context: &mut Context<'_>,
        took: Poll<io::Result<T>>,
        bytes: impl Fn(&T) -> usize,
    ) -> Poll<io::Result<T>> {
        if took.is_pending() {
            let left = self.pace.stall.saturating_sub(self.debt);
            let (_, alarm) = self.blocked.get_or_insert_with(|| {
                let now = Instant::now();
                (now, Box::pin(sleep_until(now + left)))
            });
            ready!(alarm.as_mut().poll(context));
            return Poll::Ready(Err(io::Error::new(io::ErrorKind::TimedOut, "the client does not read")));
        }
        if let Some((since, _)) = self.blocked.take() {
            self.debt += since.elapsed();
        }
        if let Poll::Ready(Ok(value)) = &took {
            let paid = Duration::from_secs_f64(bytes(value) as f64 / f64::from(self.pace.bytes_a_second));
            self.debt = self.debt.saturating_sub(paid);
        }
        took
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for PacedStream<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for PacedStream<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let took = Pin::new(&mut self.stream).poll_write(context, bytes);
        self.watch(context, took, |n| *n)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        parts: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let took = Pin::new(&mut self.stream).poll_write_vectored(context, parts);
        self.watch(context, took, |n| *n)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let took = Pin::new(&mut self.stream).poll_flush(context);
        self.watch(context, took, |()| 0)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let took = Pin::new(&mut self.stream).poll_shutdown(context);
        self.watch(context, took, |()| 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::{AsyncReadExt, AsyncWriteExt, duplex};

    const QUICK: ReaderLimits = ReaderLimits { stall: Duration::from_millis(200), bytes_a_second: 100_000 };

    fn run<T>(test: impl Future<Output = T>) -> T {
        tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(test)
    }

    #[test]
    fn a_reader_that_stops_or_dawdles_is_not_waited_for() {
        for (part, pause) in [(0, 0), (64, 10)] {
            let written = run(async {
                let (server, mut client) = duplex(64);
                let mut server = PacedStream::new(server, QUICK);
                // 6,400 bytes a second at most, where 100,000 have to be.
                let reading = tokio::spawn(async move {
                    let mut buffer = [0; 64];
                    while part > 0 && client.read(&mut buffer[..part]).await.is_ok_and(|n| n > 0) {
                        tokio::time::sleep(Duration::from_millis(pause)).await;
                    }
                    if part == 0 {
                        std::future::pending::<()>().await;
                    }
                });
                let written = server.write_all(&[0; 1 << 20]).await;
                reading.abort();
                written
            });
            assert_eq!(written.unwrap_err().kind(), io::ErrorKind::TimedOut, "{part}");
        }
    }

    #[test]
    fn a_reader_that_keeps_up_is_served_for_longer_than_it_may_stall() {
        run(async {
            let (server, mut client) = duplex(20_000);
            let mut server = PacedStream::new(server, QUICK);
            let writing = async {
                server.write_all(&[0; 300_000]).await.unwrap();
                drop(server);
            };
            let reading = async {
                let (mut buffer, mut read) = (vec![0; 20_000], 0);
                while let Ok(n @ 1..) = client.read(&mut buffer).await {
                    read += n;
                    tokio::time::sleep(Duration::from_millis(20)).await;
                }
                read
            };
            assert_eq!(tokio::join!(writing, reading).1, 300_000);
        });
    }
}
