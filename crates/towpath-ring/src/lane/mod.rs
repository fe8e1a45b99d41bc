//! The two ends of a lane, without memory mappings and descriptors: frame states and positions.
//!
//! Cache lines that move between the processors while both sides run:
//!
//! | for | producer to consumer | consumer to producer |
//! |---|---|---|
//! | a message of up to 64 bytes | 2: header, inline payload | |
//! | a longer one | 1, and its payload's | |
//! | its single verdict | | 1/4: an entry is a quarter of a line; 1 if each is awaited |
//! | a batch's cumulative verdict | | 1/4 and 1: the record, and the number of records |
//! | a quarter of the record ring | 1: records taken | |
//! | a check whether the other side sleeps | none | none, unless the line carries other changes |
//!
//! A processor takes a line from the other side before it writes it. The producer prefetches the lines of a message
//! three ahead (producer.rs), so that the stores that publish this message do not wait: with one message at a time,
//! this makes the difference between 11 and 16 million messages per second. The consumer does not prefetch: it would
//! take lines that the producer is writing.

#[cfg(not(loom))]
pub(crate) mod batch;
pub(crate) mod consumer;
pub(crate) mod cursor;
pub(crate) mod deadline;
pub(crate) mod frames;
#[cfg(not(loom))]
pub(crate) mod loss_record;
pub(crate) mod producer;
pub(crate) mod records;
#[cfg(not(loom))]
pub(crate) mod reserve_error;
pub(crate) mod verdict;
