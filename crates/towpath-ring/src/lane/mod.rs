//! The two ends of a lane, without memory mappings and descriptors: frame states and positions.
//!
//! Average number of cache lines that move between the processors while both sides run:
//!
//! | for | producer to consumer | consumer to producer |
//! |---|---|---|
//! | a message of up to 64 bytes | 2: header, inline payload | |
//! | a longer one | 1, and its payload's | |
//! | its single verdict | | 1/4: four entries share a line; 1 if the producer waits for each verdict |
//! | a batch's cumulative verdict | | 1/4 for the record, 1 for the counter `written` |
//! | a quarter of the record ring | 1: records taken | |
//! | a check whether the other side sleeps | none | none, unless the line carries other changes |
//!
//! A processor takes a line from the other side before it writes it. While the producer publishes message n, it
//! prefetches the lines of message n+3 for writing; the stores that publish n+3 then do not wait (producer.rs). With
//! one message at a time, this makes the difference between 11 and 16 million messages per second. The consumer does
//! not prefetch: it would take lines that the producer is writing.

#[cfg(not(loom))]
pub(crate) mod batch;
#[cfg(not(loom))]
pub(crate) mod connection_event;
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
