//! The two ends of a lane without memory or descriptors: who holds which frame, and where the next one is.
//!
//! What moves between the processors, in cache lines, when both sides run:
//!
//! | for | producer to consumer | consumer to producer |
//! |---|---|---|
//! | a message of up to 64 bytes | 2: header, inline payload | |
//! | a longer one | 1, and its payload's | |
//! | its single verdict | | 1/4: an entry is a quarter of a line, and 1 when each is waited for |
//! | a batch's cumulative verdict | | 1/4 and 1: the record, and the number of records |
//! | a quarter of the record ring | 1: records taken | |
//! | looking whether the other side sleeps | none | none, unless the line carries news as well |
//!
//! A line that is written has to be taken from the other side first, which still has it from the last time round. The
//! producer asks for the lines of a message three ahead (producer.rs), so that this does not hold up the stores that
//! publish this one: a message a time, it is the difference between 11 and 16 million a second. A consumer that asked
//! ahead would only take lines away that are being written.

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
