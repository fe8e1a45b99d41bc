//! The handle that `nfq_nfnlh` returns. It belongs to the system's libnfnetlink, whose functions read its fields.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::os::fd::{AsRawFd, BorrowedFd, RawFd};
use std::ptr::NonNull;

use rustix::io::Errno;

/// `struct nfnl_handle` of libnfnetlink.
pub(crate) type Handle = NonNull<c_void>;

const LIBRARY: &CStr = c"libnfnetlink.so.0";

/// Opens a handle whose descriptor is a duplicate of `socket`. ENOSYS without libnfnetlink.
pub(crate) fn open(socket: BorrowedFd<'_>) -> Result<Handle, Errno> {
    // SAFETY: `struct nfnl_handle *nfnl_open(void)` (libnfnetlink.h).
    let open = unsafe {
        std::mem::transmute::<NonNull<c_void>, extern "C" fn() -> *mut c_void>(symbol(c"nfnl_open")?)
    };
    let handle = NonNull::new(open()).ok_or(Errno::NOMEM)?;
    match redirect(handle, socket) {
        Ok(_) => Ok(handle),
        Err(error) => {
            close(handle);
            Err(error)
        }
    }
}

/// Makes the descriptor of a handle a duplicate of `socket`. Returns the descriptor.
pub(crate) fn redirect(handle: Handle, socket: BorrowedFd<'_>) -> Result<RawFd, Errno> {
    // SAFETY: `int nfnl_fd(struct nfnl_handle *)` (libnfnetlink.h).
    let fd = unsafe {
        std::mem::transmute::<NonNull<c_void>, extern "C" fn(Handle) -> c_int>(symbol(c"nfnl_fd")?)
    };
    let fd = fd(handle);
    // SAFETY: dup3 takes any numbers. The descriptor belongs to the handle, which keeps it.
    match unsafe { libc::dup3(socket.as_raw_fd(), fd, libc::O_CLOEXEC) } {
        -1 => Err(Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::BADF)),
        fd => Ok(fd),
    }
}

/// Closes a handle.
pub(crate) fn close(handle: Handle) {
    let Ok(close) = symbol(c"nfnl_close") else { return };
    // SAFETY: `int nfnl_close(struct nfnl_handle *)` (libnfnetlink.h).
    let close = unsafe { std::mem::transmute::<NonNull<c_void>, extern "C" fn(Handle) -> c_int>(close) };
    close(handle);
}

fn symbol(name: &CStr) -> Result<NonNull<c_void>, Errno> {
    // SAFETY: a NUL-terminated name. The library is never unloaded.
    let library = unsafe { libc::dlopen(LIBRARY.as_ptr(), libc::RTLD_NOW) };
    if library.is_null() {
        return Err(Errno::NOSYS);
    }
    // SAFETY: a loaded library and a NUL-terminated name.
    NonNull::new(unsafe { libc::dlsym(library, name.as_ptr()) }).ok_or(Errno::NOSYS)
}

/// `nlif_index2name`: writes the name of the interface `index` from the table of `nlif_open`.
pub(crate) fn name_of(table: *mut c_void, index: u32, name: *mut c_char) -> Result<c_int, Errno> {
    type Function = extern "C" fn(*mut c_void, c_uint, *mut c_char) -> c_int;
    // SAFETY: `int nlif_index2name(struct nlif_handle *, unsigned int, char *)` (libnfnetlink.h).
    let function = unsafe { std::mem::transmute::<NonNull<c_void>, Function>(symbol(c"nlif_index2name")?) };
    Ok(function(table, index, name))
}
