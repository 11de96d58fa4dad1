// The arguments of the exchanges over TCP, the same on every platform.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "handlers/buffers.h"
#include "tcp/allreduce.h"
#include "tcp/collectives.h"
#include "tcp/workspaces.h"

namespace jaxcgx {

// An exchange of raw bytes. The tokens only order the exchanges of a program.
struct TcpExchange {
  tcp::Group group;
  tcp::Collective collective;  // with the operand as `in`
};
ffi::ErrorOr<TcpExchange> read_exchange(int32_t device, ffi::AnyBuffer x, ffi::Dictionary dictionary);
// Checks the result of an exchange of x.
ffi::Error check_result(const TcpExchange& asked, const ffi::AnyBuffer& x, const ffi::AnyBuffer& y);

// Such an exchange in two calls, begin and end, as of a sum.
//
// begin: operands x, a token. Results: a ticket, a token.
// end: operands: the ticket, a token if `ordered`. Results: y, a token if `ordered`. A ticket of zeros gives zeros.

struct TcpTransfer {
  std::shared_ptr<tcp::Transfer> transfer;
  tcp::Group group;
  int64_t bytes;    // of x
  uint32_t* words;  // the ticket
};
ffi::ErrorOr<TcpTransfer> read_transfer(int32_t device, ffi::AnyBuffer x, ffi::AnyBuffer ticket,
                                        ffi::Dictionary dictionary, tcp::Workspaces& memory,
                                        const std::string& remedy = "");

struct TcpTransferEnd {
  const uint32_t* words;
  uint8_t* out;
  int64_t bytes;
};
ffi::ErrorOr<TcpTransferEnd> read_transfer_end(const ffi::RemainingArgs& args, const ffi::RemainingRets& rets,
                                               ffi::Dictionary dictionary);
// Returns the transfer of a device with this ticket. It no longer has the ticket.
ffi::ErrorOr<std::shared_ptr<tcp::Transfer>> transfer_of(const TcpTransferEnd& end, uint64_t ticket, int32_t device);

// A sum of messages takes two calls, begin and end. Between them the program does other work, or returns: then a later
// program ends the sum.
//
// begin:
//  - Operands: leaves, residuals (with feedback), keys (if the codec is stochastic), a token.
//    There is one key; with two_shot there are also a key for the root's sum and a key for the other sums.
//  - Results: new residuals (with feedback), a ticket (two words, the same for each message of the batch), a token. The
//    tokens only order the exchanges of a program.
//
//    With `inside` > 1, that many devices of each process add their leaves first (tcp/allreduce.h): the leaves are then
//    those of `whole_sizes` and `whole_dtypes`, and the residuals those of this device's share.
//
// end:
//  - Operands: the ticket, new residuals (with feedback), a token if `ordered`.
//  - Results: the sums (one_shot: fp32; two_shot: the leaves' dtypes), new residuals (with feedback), a token if
//    `ordered`. With whole_sizes, the sums are whole, too, and have the dtypes `whole_dtypes`. A ticket of zeros means
//    that no sum has begun. Then the sums are zeros.

struct TcpBegin {
  tcp::Allreduce sum;
  tcp::Allreduce::Inputs first;
  tcp::Group group;                  // empty if there are no messages
  std::optional<tcp::Group> inside;  // the devices of this process that add their leaves first
  uint32_t* words;                   // the ticket
};
// `memory`: for the workspace of the sum. Where it has none left, the error says `remedy`.
ffi::ErrorOr<TcpBegin> read_begin(int32_t device, const ffi::RemainingArgs& args, const ffi::RemainingRets& rets,
                                  ffi::Dictionary dictionary, tcp::Workspaces& memory, const std::string& remedy = "");

struct TcpEnd {
  Message message;
  std::vector<Leaf> leaves;  // of the outputs
  tcp::Allreduce::Outputs first;
  const uint32_t* words;
  bool two_shot, feedback, whole;
};
ffi::ErrorOr<TcpEnd> read_end(const ffi::RemainingArgs& args, const ffi::RemainingRets& rets,
                              ffi::Dictionary dictionary);
// Returns the sum of a device with this ticket, which must be one of these messages. It no longer has the ticket.
ffi::ErrorOr<std::shared_ptr<tcp::Running>> sum_of(const TcpEnd& end, uint64_t ticket, int32_t device);

// Calls f(buffer, bytes) for each output.
template <class F>
void each_output(const TcpEnd& end, F f) {
  const auto size = [&](size_t i) { return end.message.batch * end.leaves[i].size; };
  for (size_t i = 0; i < end.first.results.size(); ++i) f(end.first.results[i], size(i) * size_of(end.leaves[i].dtype));
  for (size_t i = 0; i < end.first.sums.size(); ++i) f(end.first.sums[i], size(i) * int64_t{sizeof(float)});
}

}  // namespace jaxcgx
