//! Steps that make a machine's private copy of its image before its disk is started.
//!
//! Invariant: a copy gets its name only when it is complete, and it is recorded whether it shares extents with the image.

use super::{MachineReconciler, StepOutcome, WakeupConditions};
use crate::error::HostError;
use crate::machines::blocking;
use crate::machines::placing::{self, FinishedCopy};
use crate::machines::run::{PrivateCopy, RunRecord};
use crate::machines::status::Status;
use spillway_api::{ErrorCode, Phase};
use std::future::pending;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use tokio::sync::Notify;
use tokio::task::JoinHandle;

/// A private copy that is being made.
pub(super) struct CopyInProgress {
    work: JoinHandle<Result<Option<FinishedCopy>, HostError>>,
    unwanted: Arc<CopyCancellation>,
}

/// Cancels a copy: for the thread that makes it, and for a task that waits for its turn.
#[derive(Default)]
struct CopyCancellation {
    is: AtomicBool,
    told: Notify,
}

impl MachineReconciler {
    /// Starts to make the private copy, if that is not going on.
    pub(super) fn place(&mut self, run: &RunRecord, copy: PrivateCopy) -> Result<StepOutcome, HostError> {
        self.publish(Status::new(Phase::Placing).of(run, &self.folder));
        if self.placing.is_none() {
            let unwanted = Arc::<CopyCancellation>::default();
            let (shared, told) = (Arc::clone(&self.shared), Arc::clone(&unwanted));
            let (image, version) = (run.image.clone(), run.version);
            let work = tokio::spawn(async move {
                let turn = tokio::select! {
                    turn = shared.turn_to_copy(&image, version, &copy.path) => turn?,
                    () = told.told.notified() => return Ok(None),
                };
                let (images, told) = (shared.images.clone(), Arc::clone(&told));
                blocking(move || {
                    let _turn = turn;
                    placing::copy(&images.disk(&image, version)?, &copy.path, &told.is)
                })
                .await
            });
            self.placing = Some(CopyInProgress { work, unwanted });
        }
        Ok(StepOutcome::Rest(WakeupConditions::for_end_of(None, None)?))
    }

    /// Cancels the private copy.
    pub(super) async fn stop_placing(&mut self) {
        if let Some(placing) = self.placing.take() {
            placing.unwanted.is.store(true, Ordering::Relaxed);
            placing.unwanted.told.notify_one();
            let _ = placing.work.await;
        }
    }

    /// Records a finished copy. If it failed for lack of space, another store is looked for.
    pub(super) async fn finish_placing(
        &mut self,
        made: Result<Option<FinishedCopy>, HostError>,
    ) -> Result<(), HostError> {
        let folder = self.folder.clone();
        let run = blocking(move || folder.load()).await?;
        let Some((mut run, copy)) = run.and_then(|run| run.copy.clone().map(|copy| (run, copy))) else {
            return Ok(());
        };
        match made {
            Ok(None) => Ok(()),
            Ok(Some(FinishedCopy { is_shared })) => {
                let (folder, path) = (self.folder.clone(), copy.path.clone());
                blocking(move || {
                    if is_shared {
                        run.copy = Some(PrivateCopy { is_shared, ..copy });
                        folder.save(&run)?;
                    }
                    placing::finish(&path)
                })
                .await
            }
            Err(full) if full.code == ErrorCode::Exhausted => {
                self.forget(run).await?;
                Err(full)
            }
            Err(error) => Err(error),
        }
    }
}

/// Waits until a copy is finished or has failed; forever, if none is being made.
pub(super) async fn placed(placing: &mut Option<CopyInProgress>) -> Result<Option<FinishedCopy>, HostError> {
    let Some(going_on) = placing else { return pending().await };
    let done = (&mut going_on.work).await;
    *placing = None;
    done.map_err(|e| HostError::new(ErrorCode::Internal, format!("a fault of the daemon: {e}")))?
}
