//! Body of a response that another host sends. Owns the time limits while it goes on.
//!
//! Invariant: one part is in memory at a time. A body whose host sends nothing for [`SILENCE`], or whose user may not have it any more, ends
//! with an error, so that nobody takes it for complete.

use crate::fleet::door::HostBody;
use axum::body::{Bytes, HttpBody};
use hyper::body::{Frame, SizeHint};
use std::io::{Error, ErrorKind};
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::time::{Instant, Sleep, sleep};

/// Longest time without data: streams of events have a comment every 15 s.
const SILENCE: Duration = Duration::from_secs(60);

/// A body that is passed on.
pub struct PassedBody {
    body: HostBody,
    over: Pin<Box<dyn Future<Output = ()> + Send>>,
    silence: Pin<Box<Sleep>>,
}

impl PassedBody {
    /// `over` returns when the body has to end.
    pub fn new(body: HostBody, over: impl Future<Output = ()> + Send + 'static) -> PassedBody {
        PassedBody { body, over: Box::pin(over), silence: Box::pin(sleep(SILENCE)) }
    }
}

impl HttpBody for PassedBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        let end = |kind, why| Poll::Ready(Some(Err(axum::Error::new(Error::new(kind, why)))));
        if self.over.as_mut().poll(context).is_ready() {
            return end(
                ErrorKind::PermissionDenied,
                "the session has ended, or its token, or the host has left",
            );
        }
        match Pin::new(&mut self.body).poll_frame(context) {
            Poll::Ready(frame) => {
                self.silence.as_mut().reset(Instant::now() + SILENCE);
                Poll::Ready(frame.map(|frame| frame.map_err(axum::Error::new)))
            }
            Poll::Pending if self.silence.as_mut().poll(context).is_ready() => {
                end(ErrorKind::TimedOut, "the other host sends nothing")
            }
            Poll::Pending => Poll::Pending,
        }
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
