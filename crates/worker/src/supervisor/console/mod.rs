//! The console hub: connects the serial port of a VMM with any number of readers and one keyboard. Runs on a thread of its
//! own, so that neither a guest nor a client of the console can delay what the supervisor does for the disk.

mod client;
mod history;
mod hub;

pub use hub::ConsoleHub;
